"""Headers of safetensors files: sound ones give the tensors, all others a clear error."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from fxquant.checkpoint.header import DTYPES, MAX_HEADER_BYTES, Header, read_header
from fxquant.errors import CheckpointFileError, FxquantError
from tests.checkpoint.headers import entry, pack

HERE = Path("some") / "model.safetensors"
LIMIT_BYTES = 64 * 2**20
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["F32", "F4", "BOOL", "dtype", "shape", "data_offsets"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
GOOD = save(
    {
        "a.weight": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(7, dtype=torch.int16),
        "c": torch.empty(0, 4),
    },
    metadata={"format": "pt"},
)


def parse(raw: bytes) -> Header:
    """Read a header from memory, checking that no more is asked for than exists."""

    def read(offset: int, count: int) -> bytes:
        assert offset >= 0
        assert offset + count <= len(raw)
        return raw[offset : offset + count]

    return read_header(read, len(raw), file="model.safetensors", path=HERE)


def agrees_with_library(raw: bytes, header: Header) -> bool:
    """Whether the safetensors library finds the same tensors in the same bytes."""
    theirs = {
        name: (view["dtype"], bytes(view["data"]), tuple(view["shape"]))
        for name, view in safetensors.deserialize(raw)
    }
    ours = {}
    for info in header.tensors:
        assert info.offset is not None
        name = next(name for name, dtype in DTYPES.items() if dtype is info.dtype)
        shape = (*info.shape[:-1], 2 * info.shape[-1]) if name == "F4" else info.shape
        ours[info.key] = (name, raw[info.offset : info.offset + info.nbytes], shape)
    return ours == theirs


def test_sound_header_gives_tensors_in_byte_order() -> None:
    header = parse(GOOD)
    assert agrees_with_library(GOOD, header)
    assert header.metadata == {"format": "pt"}
    assert [info.offset for info in header.tensors] == sorted(info.offset or 0 for info in header.tensors)
    assert {info.key: (info.dtype, info.shape, info.nbytes) for info in header.tensors} == {
        "a.weight": (torch.float32, (2, 3), 24),
        "b": (torch.int16, (), 2),
        "c": (torch.float32, (0, 4), 0),
    }


def test_metadata_without_tensors_is_an_empty_checkpoint() -> None:
    header = parse(pack({"__metadata__": {"format": "pt"}}))
    assert header.tensors == ()
    assert header.metadata == {"format": "pt"}


def test_padding_behind_the_json_is_allowed() -> None:
    assert (
        parse(pack(json.dumps({"a": entry([1], 0, 4)}).encode() + b"    ", bytes(4))).tensors[0].offset
        == 8 + 65
    )


def test_f4_shape_is_halved_once() -> None:
    (info,) = parse(pack({"a": entry([3, 8], 0, 12, "F4")}, bytes(12))).tensors
    assert (info.dtype, info.shape, info.nbytes) == (torch.float4_e2m1fn_x2, (3, 4), 12)


@pytest.mark.parametrize("shape", [[3, 7], [], [3]])
def test_odd_f4_width_is_refused(shape: list[int]) -> None:
    with pytest.raises(CheckpointFileError, match=r"F4 packs two values in a byte.*must be even"):
        parse(pack({"a": entry(shape, 0, 12, "F4")}, bytes(12)))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is empty"),
        (b"1234567", "has 7 bytes"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "Git LFS pointer.*git lfs pull",
        ),
        (struct.pack("<Q", 2**63) + b"{}", "declares a header of 9223372036854775808 bytes but has only 10"),
        (struct.pack("<Q", 3) + b"{}", "declares a header of 3 bytes but has only 10"),
        (GOOD[:-1], r"cut short.*\(1 missing\)"),
        (GOOD + b"\0", "1 bytes follow the last tensor"),
        (pack(b""), "not a JSON object"),
        (pack(b"[]"), "not a JSON object"),
        (pack(b"{"), "JSON is damaged"),
        (pack(b'{"a": \xff}'), "JSON is damaged"),
        (pack(b'{"a": NaN}'), "NaN is not a JSON number"),
        (pack(b'{"a": ' + b"9" * 5000 + b"}"), "JSON is damaged"),
        (pack(b'{"a":' * 100_000), "nested too deeply"),
        (pack(b'{"__metadata__": {}, "__metadata__": {}}'), "'__metadata__' appears twice"),
        (pack({"__metadata__": {"a": 1}}), "__metadata__ in the header is not an object of texts"),
        (pack({"__metadata__": []}), "__metadata__ in the header is not an object of texts"),
        (
            pack(b'{"\\ud800": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}', bytes(4)),
            "not valid Unicode",
        ),
    ],
)
def test_damaged_file_is_refused_in_words(raw: bytes, words: str) -> None:
    with pytest.raises(CheckpointFileError, match=words) as caught:
        parse(raw)
    assert str(HERE) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "must be an object with dtype"),
        ({"dtype": "F32", "shape": [1]}, "must be an object with dtype"),
        (entry([1], 0, 4, "F6_E2M3"), "dtype 'F6_E2M3' is not supported"),
        (entry([1], 0, 4, ["F32"]), "dtype .* is not supported"),
        (entry([-1], 0, 4), "negative or too large"),
        (entry([2**40, 2**40], 0, 4), "negative or too large"),
        (entry([0, 2**62, 2**62], 0, 0), "negative or too large"),
        (entry([True], 0, 4), "not a list of integers"),
        (entry([1.0], 0, 4), "not a list of integers"),
        (entry([1] * 65, 0, 4), "65 dimensions"),
        ({"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}, "not a list of integers"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}, "not two integers"),
        (entry([1], False, 4), "not two integers"),
        (entry([1], 0, 4.0), "not two integers"),
        (entry([1], -4, 0), "negative or reversed"),
        (entry([1], 4, 0), "negative or reversed"),
        (entry([2], 0, 4), "takes 8 bytes but data_offsets"),
        (entry([1], 0, 2), "takes 4 bytes but data_offsets"),
        (entry([1], 2**60, 2**60 + 4), "cut short"),
        (entry([2**40], 0, 2**42), "cut short"),
    ],
)
def test_bad_entry_is_refused_and_named(value: object, words: str) -> None:
    with pytest.raises(CheckpointFileError, match=words):
        parse(pack({"the.tensor": value}, bytes(4)))


@pytest.mark.parametrize(("begin", "words"), [(2, "overlaps"), (6, "leaves a hole after")])
def test_tensors_must_fill_the_data(begin: int, words: str) -> None:
    table = {"a": entry([1], 0, 4), "b": entry([1], begin, begin + 4)}
    with pytest.raises(CheckpointFileError, match=f"'b'.*{words} 'a'"):
        parse(pack(table, bytes(begin + 4)))


def test_first_tensor_must_start_the_data() -> None:
    with pytest.raises(CheckpointFileError, match=r"'a'.*leaves a hole after 'the header'"):
        parse(pack({"a": entry([1], 4, 8)}, bytes(8)))


def test_same_key_twice_is_refused() -> None:
    one = json.dumps(entry([1], 0, 4))
    with pytest.raises(CheckpointFileError, match="'a' appears twice"):
        parse(pack(f'{{"a": {one}, "a": {one}}}'.encode(), bytes(4)))


def test_long_header_of_a_long_file_is_called_a_limit() -> None:
    def read(offset: int, count: int) -> bytes:
        assert offset == 0, "the header must not be read"
        return struct.pack("<Q", MAX_HEADER_BYTES + 1).ljust(count, b"{")

    with pytest.raises(CheckpointFileError, match=r"over the limit.*not corruption"):
        read_header(read, MAX_HEADER_BYTES + 9, file="model.safetensors", path=HERE)


def test_names_in_messages_are_bounded() -> None:
    with pytest.raises(CheckpointFileError) as caught:
        parse(pack({"k" * 100_000: entry([1], 0, 4, "x" * 100_000)}, bytes(4)))
    assert len(str(caught.value)) < 2000


def check_never_breaks(raw: bytes) -> None:
    """A clear error or the tensors that the library finds, within bounded memory."""
    tracemalloc.start()
    try:
        header = parse(raw)
    except FxquantError:
        header = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < LIMIT_BYTES
    if header is not None:
        assert sum(info.nbytes for info in header.tensors) <= len(raw)
        assert agrees_with_library(raw, header)


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes(flips: list[tuple[int, int]]) -> None:
    raw = bytearray(GOOD)
    for at, value in flips:
        raw[at] = value
    check_never_breaks(bytes(raw))


@given(st.integers(0, len(GOOD)), st.integers(0, 16), st.binary(max_size=16))
def test_cut_and_inserted_bytes(at: int, drop: int, insert: bytes) -> None:
    check_never_breaks(GOOD[:at] + insert + GOOD[at + drop :])


@given(st.integers(0, 2**64 - 1), st.binary(max_size=64))
def test_any_declared_length(length: int, rest: bytes) -> None:
    check_never_breaks(struct.pack("<Q", length) + rest)


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__", "\ud800"]) | st.text(max_size=4),
        JSON_VALUES
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(sorted(DTYPES)) | JSON_VALUES,
                "shape": st.lists(st.integers(-1, 5) | JSON_VALUES, max_size=3),
                "data_offsets": st.lists(st.integers(-1, 16) | JSON_VALUES, min_size=1, max_size=3),
            }
        ),
        max_size=3,
    ),
    st.integers(0, 16),
)
def test_any_json_as_header(table: dict[str, object], data: int) -> None:
    check_never_breaks(pack(table, bytes(data)))


@given(
    st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)), max_size=4)
)
def test_every_well_formed_header_is_accepted(tensors: list[tuple[str, list[int]]]) -> None:
    table, end = {}, 0
    for number, (dtype, dims) in enumerate(tensors):
        shape = [*dims, 2] if dtype == "F4" else dims
        count = torch.Size(shape).numel()
        size = count // 2 if dtype == "F4" else count * DTYPES[dtype].itemsize
        table[f"t{number}"] = entry(shape, end, end + size, dtype)
        end += size
    raw = pack(table, bytes(end))
    header = parse(raw)
    assert len(header.tensors) == len(tensors)
    assert agrees_with_library(raw, header)
