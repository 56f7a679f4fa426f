"""Reading of files, folders and indexes: only what counts, exactly, or a clear error."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from fxquant.checkpoint import FileCheckpoint, open_checkpoint
from fxquant.checkpoint.files import PIECE_BYTES
from fxquant.checkpoint.header import DTYPES
from fxquant.errors import CheckpointFileError, ConfigError, MissingWeightError
from tests.checkpoint.conftest import WriteSharded
from tests.checkpoint.headers import entry, pack

WriteBytes = Callable[..., Path]
A, B = torch.arange(12.0).reshape(4, 3), torch.tensor([1, -2, 3], dtype=torch.int8)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype is right.dtype
        and left.shape == right.shape
        and left.contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .equal(right.contiguous().reshape(-1).view(torch.uint8))
    )


# ------------------------------------------------------------------------------------ what is read


def test_folder_file_and_index_give_the_same_tensors(write_sharded: WriteSharded) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    folder = write_sharded({one: {"b": B}, two: {"a": A}}, {"a": two, "b": one})
    for path in (folder, str(folder), folder / "model.safetensors.index.json"):
        with open_checkpoint(path) as checkpoint:
            assert list(checkpoint.infos) == ["b", "a"]
            assert checkpoint.infos["a"].file == two
            assert torch.equal(checkpoint.read("a"), A)
            assert torch.equal(checkpoint.read("b"), B)
            assert not checkpoint.streaming
            assert checkpoint.location == str(path)
    assert list(open_checkpoint(folder / one).infos) == ["b"]


def test_offsets_are_absolute(write_bytes: WriteBytes) -> None:
    path = write_bytes(save({"a": A, "b": B}))
    for info in open_checkpoint(path).infos.values():
        assert info.offset is not None
        stored = path.read_bytes()[info.offset : info.offset + info.nbytes]
        assert stored == {"a": A, "b": B}[info.key].numpy().tobytes()


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_of_the_format_is_read(name: str, write_bytes: WriteBytes) -> None:
    dtype = DTYPES[name]
    data = bytes(range(2)) * 24 if name == "BOOL" else bytes(range(48))
    shape = [6, 16 // (2 * dtype.itemsize)] if name != "F4" else [6, 16]
    table = {"x": entry(shape, 0, 48, name)}
    raw = pack(table, data)
    checkpoint = open_checkpoint(write_bytes(raw))
    tensor, rows = checkpoint.read("x"), checkpoint.read_rows("x", 1, 5)
    assert tensor.dtype is dtype
    assert tensor.shape == checkpoint.infos["x"].shape == (6, 8 // dtype.itemsize)
    assert bytes(tensor.view(torch.uint8).numpy().tobytes()) == data
    assert bytes(rows.view(torch.uint8).numpy().tobytes()) == data[8:40]


@given(
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int64]),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_any_shape_and_row_range(shape: list[int], dtype: torch.dtype, start: int, stop: int) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    path = Path(os.environ["FXQUANT_TEST_FOLDER"]) / "any.safetensors"
    save_file({"before": B, "x": tensor}, path)
    with FileCheckpoint(path) as checkpoint:
        assert same_bytes(checkpoint.read("x"), tensor)
        if shape and start <= stop <= shape[0]:
            assert same_bytes(checkpoint.read_rows("x", start, stop), tensor[start:stop])
        else:
            with pytest.raises(ConfigError, match="rows"):
                checkpoint.read_rows("x", start, stop)


@pytest.fixture(autouse=True)
def _folder_for_hypothesis(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXQUANT_TEST_FOLDER", str(tmp_path_factory.mktemp("any")))


def test_each_read_owns_its_memory(write_bytes: WriteBytes) -> None:
    checkpoint = open_checkpoint(write_bytes(save({"a": A})))
    first, second = checkpoint.read("a"), checkpoint.read("a")
    first.zero_()
    assert torch.equal(second, A)
    assert second.untyped_storage().nbytes() == A.nbytes
    rows = checkpoint.read_rows("a", 1, 2)
    assert rows.untyped_storage().nbytes() == A[1:2].nbytes


def test_reads_land_on_the_cpu_whatever_the_default_device(write_bytes: WriteBytes) -> None:
    checkpoint = open_checkpoint(write_bytes(save({"a": A})))
    with torch.device("meta"):
        assert torch.equal(checkpoint.read("a").to("cpu"), A)


def test_config_metadata_and_quantization(write_bytes: WriteBytes) -> None:
    path = write_bytes(save({"a": A}, metadata={"lm_head.weight": "a"}))
    quantization = {"quant_method": "gptq", "bits": 4}
    (path.parent / "config.json").write_text(
        json.dumps({"model_type": "toy", "quantization_config": quantization})
    )
    checkpoint = open_checkpoint(path.parent)
    assert checkpoint.metadata == {"lm_head.weight": "a"}
    assert checkpoint.config["model_type"] == "toy"
    assert checkpoint.quantization == quantization


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, None),
        ({}, None),
        ({"quantization_config": None}, None),
        ({"compression_config": {"format": "x"}}, {"format": "x"}),
        ({"text_config": {"quantization_config": {"bits": 8}}}, {"bits": 8}),
    ],
)
def test_where_quantization_is_looked_for(config: object, expected: object, write_bytes: WriteBytes) -> None:
    path = write_bytes(save({"a": A}))
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(path).quantization == expected


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"quantization_config": "int8"}'])
def test_damaged_config_is_an_error(text: str, write_bytes: WriteBytes) -> None:
    path = write_bytes(save({"a": A}))
    (path.parent / "config.json").write_text(text)
    with pytest.raises(CheckpointFileError, match=r"config\.json"):
        assert open_checkpoint(path).quantization


def test_identity_follows_the_layout_and_not_the_place(tmp_path: Path) -> None:
    def identity(name: str, tensors: dict[str, torch.Tensor]) -> str:
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        return open_checkpoint(tmp_path / name).identity

    one = identity("one", {"a": A})
    assert one == identity("same", {"a": A})
    others = [{"b": A}, {"a": A.double()}, {"a": A.T.contiguous()}, {"a": A, "b": B}]
    assert len({one} | {identity(str(n), tensors) for n, tensors in enumerate(others)}) == 5


def test_absent_key_names_the_nearest(write_bytes: WriteBytes) -> None:
    checkpoint = open_checkpoint(write_bytes(save({"layers.0.weight": A})))
    with pytest.raises(MissingWeightError, match=r"no tensor 'layers.1.weight'.*nearest: layers.0.weight"):
        checkpoint.read("layers.1.weight")


# --------------------------------------------------------------------------------- which file counts


def test_only_the_assignment_of_the_index_counts(write_sharded: WriteSharded) -> None:
    files = {
        "x.safetensors": {"a": A, "b": B},
        "y.safetensors": {"a": A + 1},
        "stray.safetensors": {"a": A + 2, "c": B},
    }
    folder = write_sharded(files, {"a": "y.safetensors", "b": "x.safetensors"})
    (folder / "model.safetensors").write_bytes(b"damaged, but not in the index")
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.infos) == ["b", "a"]
    assert torch.equal(checkpoint.read("a"), A + 1)


def test_model_file_is_preferred_to_others(write_sharded: WriteSharded) -> None:
    folder = write_sharded({"consolidated.safetensors": {"a": A + 1}, "model.safetensors": {"a": A}}, None)
    assert torch.equal(open_checkpoint(folder).read("a"), A)


def test_files_without_an_index_are_joined(write_sharded: WriteSharded) -> None:
    folder = write_sharded({"x.safetensors": {"a": A}, "y.safetensors": {"b": B}}, None)
    (folder / "._y.safetensors").write_bytes(b"a hidden file of another system")
    assert list(open_checkpoint(folder).infos) == ["a", "b"]


def test_same_key_in_two_files_without_an_index(write_sharded: WriteSharded) -> None:
    folder = write_sharded({"x.safetensors": {"a": A}, "y.safetensors": {"a": A}}, None)
    with pytest.raises(CheckpointFileError, match=r"'a' is in x.safetensors and in y.safetensors"):
        open_checkpoint(folder)


def test_two_indexes_are_not_guessed_between(write_sharded: WriteSharded) -> None:
    folder = write_sharded({"x.safetensors": {"a": A}}, {"a": "x.safetensors"})
    shutil.copy(
        folder / "model.safetensors.index.json", folder / "diffusion_pytorch_model.safetensors.index.json"
    )
    with pytest.raises(CheckpointFileError, match="two indexes"):
        open_checkpoint(folder)
    assert list(open_checkpoint(folder / "model.safetensors.index.json").infos) == ["a"]


def test_links_of_a_download_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots").mkdir()
    save_file({"a": A}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshots" / "model.safetensors").symlink_to("../blobs/0123")
    assert torch.equal(open_checkpoint(tmp_path / "snapshots").read("a"), A)


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ("../secret.safetensors", "outside the folder"),
        ("sub/../../secret.safetensors", "outside the folder"),
        ("/etc/secret.safetensors", "outside the folder"),
        ("..\\secret.safetensors", "outside the folder"),
        ("x\0.safetensors", "outside the folder"),
        ("gone.safetensors", "places 1 tensors in 'gone.safetensors', which does not exist"),
        ("x" * 300 + ".safetensors", "does not exist"),
        ("\ud800.safetensors", "does not exist"),
        ("pytorch_model.bin", "is a pickle"),
        ("config.json", "is not a .safetensors file"),
        ("", "is not a .safetensors file"),
        (7, "expected a file name"),
        (["x.safetensors"], "expected a file name"),
    ],
)
def test_unsafe_or_absent_shard(shard: object, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    save_file({"a": A}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointFileError, match=words):
        open_checkpoint(folder)


def test_shard_in_a_subfolder_is_allowed(write_sharded: WriteSharded) -> None:
    folder = write_sharded({"part/x.safetensors": {"a": A}}, {"a": "part/x.safetensors"})
    assert torch.equal(open_checkpoint(folder).read("a"), A)


def test_index_naming_a_tensor_that_its_shard_lacks(write_sharded: WriteSharded) -> None:
    folder = write_sharded({"x.safetensors": {"a": A}}, {"a": "x.safetensors", "b": "x.safetensors"})
    with pytest.raises(
        CheckpointFileError, match=r"places tensor 'b' in x.safetensors, which does not hold it"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "no object 'weight_map'"),
        ("{}", "no object 'weight_map'"),
        ('{"weight_map": ["a"]}', "no object 'weight_map'"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' appears twice"),
        ("{", "JSON is damaged"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_damaged_index(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointFileError, match=words):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "looked for model.safetensors.index.json.*the folder is empty"),
        (["config.json"], "looked for model.safetensors.index.json"),
        (["pytorch_model.bin"], "holds pytorch_model.bin, but fxquant never opens pickles"),
        (["model_index.json"], "pass the folder of one component"),
    ],
)
def test_folder_without_weights_says_what_was_looked_for(
    names: list[str], words: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointFileError, match=words):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_pickles_are_never_loaded(name: str, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / name).write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointFileError, match="is a pickle"):
        open_checkpoint(tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("org/model", "download it first"),
        ("/no/such/folder", "no file or folder"),
        ("a\0b", "no file"),
        ("", "empty"),
    ],
)
def test_absent_path(path: str, words: str) -> None:
    with pytest.raises(CheckpointFileError, match=words):
        open_checkpoint(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointFileError, match="is not a checkpoint that fxquant reads"):
        open_checkpoint(tmp_path / "notes.txt")


def test_named_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFileError, match="not a regular file"):
        open_checkpoint(tmp_path)


def test_long_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001))
    os.truncate(path, 100_000_100)  # sparse: takes no disk
    with pytest.raises(CheckpointFileError, match="limit, not corruption"):
        open_checkpoint(path)


# ------------------------------------------------------------------------------------ failing reads


def test_short_read_names_file_tensor_offset_and_bytes(
    write_bytes: WriteBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(write_bytes(save({"a": A})))
    offset = checkpoint.infos["a"].offset
    answers = iter([20, 0])
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: next(answers))
    with pytest.raises(
        CheckpointFileError, match=rf"model.safetensors: tensor 'a'.*offset {offset}.*wanted 48 bytes, got 20"
    ):
        checkpoint.read("a")


def test_device_error_is_reported_and_kept_as_cause(
    write_bytes: WriteBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(write_bytes(save({"a": A})))

    def fail(descriptor: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointFileError, match=r"tensor 'a'.*got 0: Input/output error") as caught:
        checkpoint.read("a")
    assert isinstance(caught.value.__cause__, OSError)


def test_interrupted_reads_are_continued_in_bounded_pieces(
    write_bytes: WriteBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = torch.arange(PIECE_BYTES + 4097, dtype=torch.int64).to(torch.uint8)
    checkpoint = open_checkpoint(write_bytes(save({"big": big})))
    real, asked = os.preadv, []

    def partly(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(len(buffers[0]))
        return real(descriptor, [buffers[0][: max(1, len(buffers[0]) * 3 // 4)]], offset)

    monkeypatch.setattr(os, "preadv", partly)
    assert torch.equal(checkpoint.read("big"), big)
    assert max(asked) == PIECE_BYTES
    assert len(asked) > 2


def test_file_cut_after_opening(write_bytes: WriteBytes) -> None:
    path = write_bytes(save({"a": A, "b": A + 1}))
    checkpoint = open_checkpoint(path)
    checkpoint.read("a")
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(CheckpointFileError, match="wanted 48 bytes, got 40: the file ends there"):
        checkpoint.read("b")


def test_file_replaced_before_its_first_read(write_bytes: WriteBytes) -> None:
    path = write_bytes(save({"a": A}))
    checkpoint = open_checkpoint(path)
    path.unlink()
    write_bytes(save({"a": A + 1}))
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointFileError, match="changed after its header was read"):
        checkpoint.read("a")


def test_descriptors_are_opened_late_closed_and_reopened(write_sharded: WriteSharded) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    folder = write_sharded({"x.safetensors": {"a": A}, "y.safetensors": {"b": B}}, None)
    gc.collect()  # checkpoints of other tests
    before = descriptors()
    checkpoint = open_checkpoint(folder)
    assert descriptors() == before
    for _ in range(3):
        checkpoint.read("a")
    assert descriptors() == before + 1
    checkpoint.close()
    assert descriptors() == before
    checkpoint.read("b")
    del checkpoint
    assert descriptors() == before


def test_bool_bytes_other_than_0_and_1(write_bytes: WriteBytes) -> None:
    checkpoint = open_checkpoint(write_bytes(pack({"m": entry([2], 0, 2, "BOOL")}, b"\x01\x02")))
    with pytest.raises(CheckpointFileError, match="BOOL but holds bytes other than 0 and 1"):
        checkpoint.read("m")


def test_open_error_of_a_vanished_shard(write_bytes: WriteBytes) -> None:
    path = write_bytes(save({"a": A}))
    checkpoint = open_checkpoint(path)
    path.unlink()
    with pytest.raises(CheckpointFileError, match="cannot be opened: No such file"):
        checkpoint.read("a")
