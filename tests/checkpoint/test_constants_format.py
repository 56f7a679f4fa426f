"""The folder of constants: what is written is what is read, and damage shows."""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from fxquant.checkpoint import FileCheckpoint
from fxquant.checkpoint.constants import (
    DTYPES,
    MANIFEST,
    ConstantsCheckpoint,
    StoredWeight,
    is_constants_folder,
    seal,
)
from fxquant.checkpoint.digests import DIGEST_BYTES, digest_piece, digests_of
from fxquant.checkpoint.safetensors import Piece, bytes_of
from fxquant.checkpoint.writer import DATA_ALIGNMENT, WeightConstants, write_constants
from fxquant.errors import CheckpointFileError, ConfigError
from fxquant.form import HOST, Form

ONE = "constants-00001-of-00001.safetensors"
INT8 = Form(scheme="int8")


def floating(tensor: torch.Tensor) -> WeightConstants:
    return WeightConstants(form=None, dtype=tensor.dtype, shape=tuple(tensor.shape), tensors=(tensor,))


def int8(rows: int, k: int, text: str = "int8") -> WeightConstants:
    form = Form.parse(text)
    shape = (k, rows) if form.transposed else (rows, k)
    codes = torch.randint(-127, 128, (rows, k), dtype=torch.int8)
    table = (torch.randn(shape).bfloat16(),) if form.table else ()
    tensors = (codes, torch.rand(rows, 1), *table)
    return WeightConstants(form=form, dtype=torch.bfloat16, shape=shape, tensors=tensors)


def small_weights() -> dict[str, WeightConstants]:
    return {
        "a.weight": int8(4, 6),
        "b.weight": int8(3, 5, "int8.t+table"),
        "norm": floating(torch.tensor([1.0, -2.0], dtype=torch.float16)),
        "empty": floating(torch.zeros(0, 3)),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_constants(tmp_path / "out", small_weights(), {"scheme": "int8", "list": [1, None, "x"]})
    return tmp_path / "out"


def raw_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(bytes_of(plain)) if plain.nbytes else b""


def read_all(path: Path) -> dict[str, torch.Tensor]:
    with ConstantsCheckpoint(path) as checkpoint:
        return {key: checkpoint.read(key) for key in checkpoint.infos}


# ------------------------------------------------------------------------------------- round trips


def test_what_is_written_is_read(tmp_path: Path) -> None:
    weights = small_weights()
    plan = {"scheme": "int8", "nested": {"a": [1, 2.5, None, True]}}
    write_constants(tmp_path / "out", weights, plan)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == [ONE, MANIFEST]
    with ConstantsCheckpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.manifest_plan == plan
        assert list(checkpoint.weights) == list(weights)
        assert checkpoint.weights["b.weight"] == StoredWeight(
            fqn="b.weight",
            form=Form(scheme="int8", transposed=True, table=True),
            dtype=torch.bfloat16,
            shape=(5, 3),
            constants=(("codes", "b.weight.codes"), ("scale", "b.weight.scale"), ("table", "b.weight.table")),
        )
        assert checkpoint.weights["norm"].constants == (("value", "norm"),)
        for fqn, stored in checkpoint.weights.items():
            for (_, key), tensor in zip(stored.constants, weights[fqn].tensors, strict=True):
                assert torch.equal(checkpoint.read(key), tensor)
        assert torch.equal(checkpoint.read_rows("a.weight.codes", 1, 3), weights["a.weight"].tensors[0][1:3])
        assert checkpoint.config == {}
        assert checkpoint.quantization is None


def test_other_readers_can_read_the_files(folder: Path) -> None:
    tensors = read_all(folder)
    loaded = load_file(folder / ONE)
    assert loaded.keys() == tensors.keys() == FileCheckpoint(folder).infos.keys()
    assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)
    raw = (folder / ONE).read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    assert header % DATA_ALIGNMENT == 0
    assert json.loads(raw[8:header])["__metadata__"] == {"format": "pt", "fxquant": "2"}


def test_the_manifest_is_as_documented(folder: Path) -> None:
    table = json.loads((folder / MANIFEST).read_text())
    assert list(table) == ["format", "version", "plan", "weights", "files", "digests", "sha256"]
    assert (table["format"], table["version"]) == ("fxquant-constants", 2)
    assert table["weights"]["a.weight"] == {
        "form": "int8",
        "dtype": "bfloat16",
        "shape": [4, 6],
        "constants": {"codes": "a.weight.codes", "scale": "a.weight.scale"},
    }
    assert table["weights"]["norm"]["form"] == "float"
    assert table["files"] == {ONE: (folder / ONE).stat().st_size}
    words = struct.unpack("<3Q", raw_bytes(read_all(folder)["a.weight.codes"]))
    assert table["digests"]["a.weight.codes"] == [sum(words) % 2**64]
    assert table["digests"]["empty"] == []


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@st.composite
def tensors_of_any_kind(draw: Callable[..., Any]) -> torch.Tensor:
    """A tensor of any dtype, shape and layout, with any bits (BOOL has only two)."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 5), min_size=dtype is torch.float4_e2m1fn_x2, max_size=4))
    count = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    raw = torch.tensor(list(data), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    kind = draw(st.sampled_from(["plain", "permuted", "strided", "expanded", "special"]))
    if kind == "permuted":
        return tensor.permute(draw(st.permutations(range(len(shape)))))
    if kind == "strided" and shape:
        return tensor[:: draw(st.integers(1, 3))]
    if kind == "expanded":
        return (
            tensor.view(INTEGERS[dtype.itemsize]).expand(2, *shape).view(dtype)
            if dtype.itemsize < 8
            else tensor
        )
    if kind == "special" and dtype is torch.complex64:
        return tensor.conj() if draw(st.booleans()) else tensor.conj().imag
    return tensor


@given(st.lists(tensors_of_any_kind(), max_size=4), st.integers(1, 300))
def test_any_tensors_keep_their_bytes(tensors: list[torch.Tensor], shard_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "out"
        weights = {f"t{n}": floating(tensor) for n, tensor in enumerate(tensors)}
        write_constants(path, weights, {}, shard_bytes=shard_bytes)
        found = read_all(path)
        assert found.keys() == weights.keys()
        for n, tensor in enumerate(tensors):
            assert found[f"t{n}"].dtype is tensor.dtype
            assert found[f"t{n}"].shape == tensor.shape
            assert raw_bytes(found[f"t{n}"]) == raw_bytes(tensor)
        for file in path.glob("*.safetensors"):
            assert all(raw_bytes(value) == raw_bytes(found[key]) for key, value in load_file(file).items())


@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced", "one long row", "three dimensions"])
def test_layouts_of_more_than_a_piece(layout: str, tmp_path: Path) -> None:
    base = torch.randint(-127, 128, (1531, 3001), dtype=torch.int8)
    tensor = {
        "plain": base,
        "transposed": base.t(),
        "sliced": base[1::2, 3:],
        "one long row": base.reshape(1, -1)[:, ::2],
        "three dimensions": base[:, :3000].reshape(1531, 30, 100).permute(1, 2, 0),
    }[layout]
    write_constants(tmp_path / "out", {"w": floating(tensor)}, {})
    assert torch.equal(read_all(tmp_path / "out")["w"], tensor)


def test_no_copy_beyond_a_piece_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(real(*a, **k).nbytes) or real(*a, **k))
    plain = torch.zeros(3 * DIGEST_BYTES, dtype=torch.uint8)
    write_constants(tmp_path / "a", {"w": floating(plain)}, {})
    assert made == []
    write_constants(tmp_path / "b", {"w": floating(plain.view(3, -1).t())}, {})
    assert made == [DIGEST_BYTES]


def test_shards_hold_at_most_their_size(tmp_path: Path) -> None:
    weights = {f"w{n}": floating(torch.full((n,), n, dtype=torch.uint8)) for n in (30, 30, 50, 41, 120, 1)}
    weights["again"] = floating(torch.zeros(30, dtype=torch.uint8))
    write_constants(tmp_path / "out", weights, {}, shard_bytes=100)
    files = sorted(entry.name for entry in (tmp_path / "out").glob("*.safetensors"))
    checkpoint = ConstantsCheckpoint(tmp_path / "out")
    assert files == [f"constants-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    held = [[key for key, info in checkpoint.infos.items() if info.file == file] for file in files]
    assert held == [["w30", "w50"], ["w41"], ["w120"], ["w1", "again"]]


def test_the_order_is_kept_while_every_tensor_is_aligned(tmp_path: Path) -> None:
    odd, words = torch.zeros(3, dtype=torch.int8), torch.zeros(2)
    write_constants(tmp_path / "a", {"a": floating(words), "b": floating(odd), "c": floating(odd)}, {})
    assert list(ConstantsCheckpoint(tmp_path / "a").infos) == ["a", "b", "c"]
    write_constants(tmp_path / "b", {"b": floating(odd), "a": floating(words), "c": floating(odd)}, {})
    assert list(ConstantsCheckpoint(tmp_path / "b").infos) == ["a", "b", "c"]


def test_nothing_to_store_is_a_folder_too(tmp_path: Path) -> None:
    write_constants(tmp_path / "out", {}, {})
    assert read_all(tmp_path / "out") == {}


# ------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"a": int8(2, 3), "a.codes": floating(torch.zeros(1))}, r"'a\.codes' is needed by two weights"),
        ({"__metadata__": floating(torch.zeros(1))}, "not a name"),
        ({"\ud800": floating(torch.zeros(1))}, "not a name"),
        ({"a": floating(torch.zeros(2, device="meta"))}, "meta.*expected a dense tensor"),
        ({"a": floating(torch.zeros(2).to_sparse())}, "expected a dense tensor"),
        ({"a": floating(torch.zeros(2, dtype=torch.complex128))}, "safetensors cannot hold"),
        ({"a": floating(torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2))}, "cannot hold"),
        (
            {
                "a": WeightConstants(
                    form=INT8, dtype=torch.float32, shape=(2, 3), tensors=(torch.zeros(2, 3),)
                )
            },
            "has 1 constants, expected 2",
        ),
        (
            {
                "a": WeightConstants(
                    form=INT8,
                    dtype=torch.float32,
                    shape=(2, 3),
                    tensors=(torch.zeros(3, 2, dtype=torch.int8), torch.zeros(3, 1)),
                )
            },
            r"constant 'codes' is torch\.int8 \[3, 2\]",
        ),
        (
            {"a": WeightConstants(form=INT8, dtype=torch.float32, shape=(2,), tensors=(torch.zeros(2),) * 2)},
            "two dimensions",
        ),
        (
            {"a": WeightConstants(form=HOST, dtype=torch.float32, shape=(2, 2), tensors=())},
            "has 0 constants, expected 1",
        ),
    ],
)
def test_weights_that_cannot_be_stored(
    weights: dict[str, WeightConstants], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        write_constants(tmp_path / "out", weights, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("plan", [{"a": math.nan}, {"a": {1, 2}}, {"a": object()}, {"1": 0, 1: 0}])
def test_plans_that_json_cannot_hold(plan: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the plan cannot be stored"):
        write_constants(tmp_path / "out", {}, plan)


def test_parameters_are_stored_by_their_values(tmp_path: Path) -> None:
    write_constants(tmp_path / "out", {"a": floating(torch.nn.Parameter(torch.ones(2)))}, {})
    assert torch.equal(read_all(tmp_path / "out")["a"], torch.ones(2))


def test_folders_that_are_not_of_constants(tmp_path: Path, folder: Path) -> None:
    assert is_constants_folder(folder)
    for path in (tmp_path, tmp_path / "absent", folder / MANIFEST, Path("a\0b"), Path("x" * 300)):
        assert not is_constants_folder(path)
        with pytest.raises(CheckpointFileError, match="not a folder of fxquant constants"):
            ConstantsCheckpoint(path)


# -------------------------------------------------------------------------------------------- damage


@given(st.binary(max_size=70), st.integers(0, 9))
def test_a_digest_is_the_sum_of_the_words(data: bytes, skip: int) -> None:
    padded = data[skip:] + b"\0" * (-len(data[skip:]) % 8)
    words = struct.unpack(f"<{len(padded) // 8}Q", padded)
    for view in (memoryview(data)[skip:], memoryview(bytearray(data))[skip:]):
        assert digest_piece(view) == sum(words) % 2**64
        assert digests_of(view) == ((sum(words) % 2**64,) if len(data) > skip else ())


def test_a_digest_for_each_piece() -> None:
    tensor = torch.randint(0, 256, (2 * DIGEST_BYTES + 5,), dtype=torch.uint8)
    view = bytes_of(tensor)
    parts = [view[:DIGEST_BYTES], view[DIGEST_BYTES : 2 * DIGEST_BYTES], view[2 * DIGEST_BYTES :]]
    assert digests_of(view) == tuple(map(digest_piece, parts))


@pytest.mark.parametrize("name", [MANIFEST, "constants-00002-of-00003.safetensors"])
@pytest.mark.parametrize("flip", [1, 32, 255])
def test_every_damaged_byte_is_found(name: str, flip: int, tmp_path: Path) -> None:
    write_constants(tmp_path / "out", small_weights(), {"a": "text"}, shard_bytes=50)
    path = tmp_path / "out" / name
    raw = path.read_bytes()
    if name != MANIFEST:  # the padding of the header: its first and last bytes stand for all
        end = raw.index(b"  ")
        places = [*range(end + 4), *range(DATA_ALIGNMENT - 4, len(raw))]
    else:
        places = [*range(len(raw))]
    for place in places:
        damaged = bytearray(raw)
        damaged[place] ^= flip
        path.write_bytes(damaged)
        with pytest.raises(CheckpointFileError):
            read_all(tmp_path / "out")
    path.write_bytes(raw)
    read_all(tmp_path / "out")


def test_every_cut_is_found(folder: Path) -> None:
    for name in (MANIFEST, ONE):
        raw = (folder / name).read_bytes()
        for size in {*range(0, len(raw), 97), len(raw) - 1}:
            (folder / name).write_bytes(raw[:size])
            with pytest.raises(CheckpointFileError, match=name):
                ConstantsCheckpoint(folder)
        (folder / name).write_bytes(raw)


def test_which_reads_are_checked(tmp_path: Path) -> None:
    tensor = torch.randint(-127, 128, (2 * DIGEST_BYTES + 100,), dtype=torch.int8)
    write_constants(tmp_path / "out", {"w": floating(tensor)}, {})
    raw = bytearray((tmp_path / "out" / ONE).read_bytes())
    raw[DATA_ALIGNMENT + DIGEST_BYTES + 7] ^= 1
    (tmp_path / "out" / ONE).write_bytes(raw)
    begin, end = DIGEST_BYTES, 2 * DIGEST_BYTES
    with ConstantsCheckpoint(tmp_path / "out") as checkpoint:

        def fill(start: int, stop: int) -> None:
            target = torch.empty(stop - start, dtype=torch.int8)
            checkpoint.fill([Piece("w", start, bytes_of(target))])

        for start, stop in ((begin, end), (0, end), (begin, end + 100), (begin - 3, end + 3), (0, end + 100)):
            with pytest.raises(CheckpointFileError, match=rf"{ONE}: tensor 'w' is damaged.*{begin} to {end}"):
                fill(start, stop)
        for start, stop in (
            (0, begin),
            (end, end + 100),
            (begin, end - 1),
            (begin + 1, end),
            (begin + 5, end + 100),
        ):
            fill(start, stop)
        with pytest.raises(CheckpointFileError, match=f"at offset {DATA_ALIGNMENT + begin} of the file"):
            checkpoint.read("w")


def test_identity_follows_values_and_forms(tmp_path: Path) -> None:
    def identity(name: str, weights: dict[str, WeightConstants], plan: dict[str, object]) -> str:
        write_constants(tmp_path / name, weights, plan)
        return ConstantsCheckpoint(tmp_path / name).identity

    torch.manual_seed(0)
    square = int8(4, 4)
    turned = WeightConstants(
        form=Form(scheme="int8", transposed=True), dtype=square.dtype, shape=(4, 4), tensors=square.tensors
    )
    codes, scale = square.tensors
    other = WeightConstants(form=INT8, dtype=square.dtype, shape=(4, 4), tensors=(codes, scale + 1))
    one = identity("a", {"w": square}, {})
    assert one == identity("b", {"w": square}, {"x": 1})
    assert len({one, identity("c", {"w": turned}, {}), identity("d", {"w": other}, {})}) == 3


def test_a_file_of_another_folder_is_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_constants(tmp_path / name, {"w": floating(torch.randn(30))}, {})
    (tmp_path / "a" / ONE).write_bytes((tmp_path / "b" / ONE).read_bytes())
    with pytest.raises(CheckpointFileError, match="damaged"):
        read_all(tmp_path / "a")


# -------------------------------------------------------------------------------- hostile manifests


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and put a fitting sum at its end."""
    table = json.loads((folder / MANIFEST).read_text())
    del table["sha256"]
    edit(table)
    (folder / MANIFEST).write_bytes(seal(table))


Edit = Callable[[dict[str, Any]], object]
EDITS: dict[str, tuple[Edit, str]] = {
    "version": (lambda t: t.update(version=1), "version 1 of the format, this fxquant reads version 2"),
    "true": (lambda t: t.update(version=True), "version True"),
    "format": (lambda t: t.update(format="other"), "not the manifest"),
    "field": (lambda t: t.update(more=1), "the fields are"),
    "plan": (lambda t: t.update(plan=[]), "plan: a list"),
    "weights": (lambda t: t.update(weights=None), "weights: a NoneType"),
    "entry": (lambda t: t["weights"].update(norm=3), "'norm': a int"),
    "entry field": (lambda t: t["weights"]["norm"].pop("form"), "the fields are"),
    "form": (lambda t: t["weights"]["norm"].update(form="int9"), "the form 'int9'"),
    "no scheme": (lambda t: t["weights"]["a.weight"].update(form="none"), "not one that this fxquant knows"),
    "odd form": (lambda t: t["weights"]["a.weight"].update(form="int8."), r"the form 'int8\.'"),
    "turned": (lambda t: t["weights"]["a.weight"].update(form="int8.t"), r"expected torch\.int8 \[6, 4\]"),
    "dtype": (lambda t: t["weights"]["norm"].update(dtype="float31"), "the dtype 'float31'"),
    "other dtype": (lambda t: t["weights"]["norm"].update(dtype="bfloat16"), r"expected torch\.bfloat16"),
    "shape": (lambda t: t["weights"]["norm"].update(shape=[True, 2]), "not a list of integers"),
    "negative": (lambda t: t["weights"]["norm"].update(shape=[-2]), "not a list of integers"),
    "other shape": (
        lambda t: t["weights"]["a.weight"].update(shape=[4, 5]),
        r"expected torch\.int8 \[4, 5\]",
    ),
    "rank": (lambda t: t["weights"]["a.weight"].update(shape=[4]), "two dimensions"),
    "constants": (lambda t: t["weights"]["norm"].update(constants={"codes": "norm"}), "the constants are"),
    "key type": (lambda t: t["weights"]["norm"].update(constants={"value": 1}), "the constants are"),
    "absent key": (lambda t: t["weights"]["norm"].update(constants={"value": "x"}), "'x' is in no file"),
    "twice": (lambda t: t["weights"].update(second=t["weights"]["norm"]), "'norm' is named twice"),
    "unused": (lambda t: t["weights"].pop("norm"), "the files hold more or less"),
    "traversal": (lambda t: t.update(files={"../x/" + ONE: 1}), "the files are"),
    "absolute": (lambda t: t.update(files={"/" + ONE: 1}), "the files are"),
    "other name": (lambda t: t.update(files={"model.safetensors": 1}), "the files are"),
    "count": (lambda t: t.update(files={"constants-00001-of-00002.safetensors": 1}), "the files are"),
    "no files": (lambda t: t.update(files={}), "the files are"),
    "size": (lambda t: t["files"].update({ONE: 7}), "says 7"),
    "size type": (lambda t: t["files"].update({ONE: 7.0}), "not a list of integers"),
    "digests": (lambda t: t.update(digests=[]), "digests: a list"),
    "no digest": (lambda t: t["digests"].pop("norm"), "has 0 digests, expected 1"),
    "more digests": (lambda t: t["digests"].update(empty=[0]), "has 1 digests, expected 0"),
    "stray digest": (lambda t: t["digests"].update(stray=[]), "has digests of more or less"),
    "range": (lambda t: t["digests"].update(norm=[2**64]), "not a list of integers from 0"),
    "digest type": (lambda t: t["digests"].update(norm=["1"]), "not a list of integers"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_a_manifest_must_not_say(name: str, folder: Path) -> None:
    edit, text = EDITS[name]
    change(folder, edit)
    with pytest.raises(CheckpointFileError, match=text):
        ConstantsCheckpoint(folder)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"[" * 100_000,
        b'{"format": "fxquant-constants"}',
        b"\xff",
        b'{"a": 1, "a": 1}',
    ],
)
def test_what_is_no_manifest(raw: bytes, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(raw)
    with pytest.raises(CheckpointFileError, match=MANIFEST):
        ConstantsCheckpoint(folder)


def test_values_that_are_nested_almost_too_deeply(folder: Path) -> None:
    limit = sys.getrecursionlimit()
    for depth in (*range(limit - 200, limit + 10), 2 * limit):
        text = b'{"format": "fxquant-constants", "version": ' + b"[" * depth + b"]" * depth + b"}"
        (folder / MANIFEST).write_bytes(text)
        with pytest.raises(CheckpointFileError, match=r"version|nested too deeply"):
            ConstantsCheckpoint(folder)


def test_a_manifest_that_is_not_a_file(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    with pytest.raises(CheckpointFileError, match="not a folder of fxquant constants"):
        ConstantsCheckpoint(folder)


def test_metadata_of_the_files_is_checked(folder: Path) -> None:
    raw = (folder / ONE).read_bytes()
    (folder / ONE).write_bytes(raw.replace(b'"fxquant":"2"', b'"fxquant":"1"', 1))
    with pytest.raises(CheckpointFileError, match="__metadata__ is"):
        ConstantsCheckpoint(folder)


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 2**63, 2**64, 10**30, 1.5, "", "x", "norm", "float", "int8", "int8.t", "bfloat16",
    "../" + ONE, [], [0], [2], ["x"], [[]], {}, {"value": "norm"}, {"codes": 1}, [10**400],
)  # fmt: skip


def mutate(value: Any, rng: random.Random) -> Any:
    """Change one place of a JSON value: replace, remove, rename or add."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        what = rng.random()
        if what < 0.75:
            return {**value, key: mutate(value[key], rng)}
        rest = {name: item for name, item in value.items() if name != key}
        if what < 0.85:
            return rest
        return {**rest, rng.choice(["norm", "x", ONE, "codes", key + " "]): value[key]}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], mutate(value[place], rng), *value[place + rng.randrange(2) :]]
    return rng.choice(VALUES)


def test_mutated_manifests_give_one_kind_of_error(folder: Path) -> None:
    original = json.loads((folder / MANIFEST).read_text())
    del original["sha256"]
    refused = 0
    for seed in range(600):
        table = mutate(original, random.Random(seed))
        if not isinstance(table, dict):
            continue
        (folder / MANIFEST).write_bytes(seal(table))
        try:
            read_all(folder)
        except CheckpointFileError:
            refused += 1
        else:  # the plan may be any object, and names of weights are free
            weights = [sorted(entry["weights"].values(), key=repr) for entry in (table, original)]
            assert weights[0] == weights[1]
            assert all(table[name] == original[name] for name in ("version", "files", "digests"))
    assert refused > 450


def test_the_sum_covers_every_byte_before_it(folder: Path) -> None:
    raw = (folder / MANIFEST).read_bytes()
    body, _, _ = raw.rpartition(b",\n")
    assert hashlib.sha256(body).hexdigest() == json.loads(raw)["sha256"]
    (folder / MANIFEST).write_bytes(raw.replace(b'"x"', b'"y"', 1))
    with pytest.raises(CheckpointFileError, match="damaged or was changed"):
        ConstantsCheckpoint(folder)
