"""Our definitions of the NPU's ops against torch_npu's, and how the two live in one process."""

from __future__ import annotations

import importlib.util
import mmap
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fxquant.targets.npu_chip import parse_chip
from fxquant.targets.npu_fakes import FAKES, dtype_code
from fxquant.targets.npu_schemas import GUARDED, declared, ensure_schemas, expected, is_defined, planning_for
from fxquant.targets.npu_table import CODES, SCHEMAS

WHEEL = [line for line in Path(__file__).with_name("npu_schemas.txt").read_text().splitlines() if "(" in line]
I8, I32, F32, F16, BF16 = torch.int8, torch.int32, torch.float32, torch.float16, torch.bfloat16
E4M3, U8 = torch.float8_e4m3fn, torch.uint8


def canonical(text: str) -> str:
    return str(torch._C.parse_schema(f"npu::{text}"))


def arguments(schema: str) -> str:
    return schema.partition("(")[2]


def test_schemas_are_the_wheels() -> None:
    wheel = {line.partition("(")[0]: canonical(line) for line in WHEEL}
    assert wheel == {name: expected(name) for name in SCHEMAS}


def test_defined_once() -> None:
    whose = ensure_schemas()
    assert ensure_schemas() == whose
    assert whose == ("torch_npu" if "torch_npu" in sys.modules else "fxquant")
    for name in SCHEMAS:
        assert is_defined(name)
        assert declared(name) == expected(name)
    assert not is_defined("npu_nothing")


def test_installed_wheel_declares_the_same() -> None:
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("torch_npu is not installed")
    library = Path(spec.submodule_search_locations[0]) / "lib" / "libtorch_npu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        for name in SCHEMAS:
            found = re.findall(rb"\0(?:npu::)?(%s\([^\0]*)\0" % name.encode(), text)
            assert expected(name) in {canonical(schema.decode()) for schema in found}


def t(*shape: int, dtype: torch.dtype = F16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


token = {"pertoken_scale": t(17, dtype=F32), "output_dtype": 15}
mx = {"pertoken_scale": t(4, 2, 2, dtype=U8), "output_dtype": 15, "group_sizes": [1, 1, 32]}
mx |= {"scale_dtype": 293, "pertoken_scale_dtype": 293}
moe = {"group_list": t(4, dtype=torch.int64), "split_item": 3, "group_type": 0}
fp4 = {"x_dtype": 296, "weight_dtype": 296, "output_dtype": 15}

CALLS: list[tuple[str, tuple[object, ...], dict[str, object]]] = [
    ("npu_quant_matmul", (t(17, 64, dtype=I8), t(64, 32, dtype=I8), t(32, dtype=F32)), token),
    (
        "npu_quant_matmul",
        (t(17, 64, dtype=I8), t(32, 64, dtype=I8).t(), t(1, dtype=F32)),
        {"output_dtype": 3},
    ),
    ("npu_quant_matmul", (t(2, 3, 4, 64, dtype=I8), t(64, 32, dtype=I8), t(32, dtype=F32)), {}),
    ("npu_quant_matmul", (t(4, 8, dtype=I32), t(64, 4, dtype=I32), t(32, dtype=F32)), {"output_dtype": 5}),
    (
        "npu_quant_matmul",
        (t(4, 8, dtype=I32), t(32, 8, dtype=I32).t(), t(32, dtype=F32)),
        {"output_dtype": 5},
    ),
    ("npu_quant_matmul", (t(4, 100, dtype=E4M3), t(100, 32, dtype=E4M3), t(2, 32, 2, dtype=U8)), mx),
    ("npu_dynamic_quant", (t(2, 3, 64),), {}),
    ("npu_dynamic_quant", (t(3, 64),), {"dst_type": 16}),
    ("npu_dynamic_quant", (t(3, 64),), {"quant_mode": "perchannel"}),
    ("npu_dynamic_quant", (t(3, 64),), {"quant_mode": "pertensor", "dst_type": 292}),
    ("npu_weight_quant_batchmatmul", (t(3, 64), t(64, 32, dtype=I8), t(32)), {}),
    ("npu_weight_quant_batchmatmul", (t(3, 64), t(64, 4, dtype=I32), t(2, 32)), {"antiquant_group_size": 32}),
    ("npu_weight_quant_batchmatmul", (t(3, 64), t(32, 8, dtype=I32).t(), t(32)), {}),
    ("npu_quantize", (t(3, 64), t(64, dtype=F32), None, 12, 1), {}),
    ("npu_trans_quant_param", (t(32, dtype=F32),), {}),
    ("npu_grouped_matmul", ([t(8, 64, dtype=I8)], [t(4, 64, 32, dtype=I8)]), {**moe, "output_dtype": 15}),
    (
        "npu_grouped_matmul",
        ([t(8, 64)], [t(4, 32, 8, dtype=I32).transpose(1, 2)]),
        {**moe, "antiquant_scale": [t(4, 32)], "antiquant_offset": [t(4, 32)]},
    ),
    ("npu_grouped_matmul", ([t(8, 64)], [t(4, 64, 4, dtype=I32)]), {**moe, "antiquant_scale": [t(4, 32)]}),
    ("npu_grouped_matmul", ([t(8, 32, dtype=U8)], [t(4, 32, 32, dtype=U8).transpose(1, 2)]), {**moe, **fp4}),
    ("npu_grouped_matmul", ([t(8, 32, dtype=U8)], [t(4, 64, 16, dtype=U8)]), {**moe, **fp4}),
    ("npu_quant_matmul_dequant", (t(3, 64), t(32, 64, dtype=I8), t(32, dtype=F32)), {}),
    ("npu_dynamic_mx_quant", (t(2, 3, 100),), {"dst_type": 292}),
    ("npu_dynamic_mx_quant", (t(3, 100),), {}),
    ("npu_dynamic_block_quant", (t(2, 3, 300),), {}),
    ("npu_dynamic_block_quant", (t(300, 300),), {"dst_type": 292, "row_block_size": 128}),
]
BAD: list[tuple[str, tuple[object, ...], dict[str, object]]] = [
    ("npu_quant_matmul", (t(17, 64, dtype=I8), t(60, 32, dtype=I8), t(32, dtype=F32)), token),
    ("npu_quant_matmul", (t(17, 64, dtype=I8), t(64, 32, dtype=I8), t(7, dtype=F32)), token),
    ("npu_quant_matmul", (t(64, dtype=I8), t(64, 32, dtype=I8), t(32, dtype=F32)), token),
    ("npu_quant_matmul", (t(17, 64, dtype=I8), t(64, 32, dtype=I8), t(32, dtype=BF16)), {"output_dtype": 5}),
    (
        "npu_quant_matmul",
        (t(17, 64, dtype=I8), t(64, 32, dtype=I8), t(32, dtype=F32)),
        {**token, "bias": t(32)},
    ),
    ("npu_quant_matmul_dequant", (t(3, 64, dtype=BF16), t(32, 64, dtype=I8), t(32, dtype=F32)), {}),
    ("npu_dynamic_mx_quant", (t(3, 100),), {"block_size": 48}),
    ("npu_dynamic_mx_quant", (t(3, 101),), {}),
    ("npu_dynamic_block_quant", (t(300),), {}),
    ("npu_trans_quant_param", (t(3, 32, dtype=F32),), {}),
]


def signature(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return [signature(one) for one in value]
    assert isinstance(value, Tensor)
    return tuple(value.shape), value.dtype


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS)
def test_fakes_agree_with_the_registered_op(
    op: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """With torch_npu loaded, the op's Meta kernel is the wheel's."""
    ensure_schemas()
    registered: Callable[..., object] = getattr(torch.ops.npu, op)
    assert signature(FAKES[op](*args, **kwargs)) == signature(registered(*args, **kwargs))


@pytest.mark.parametrize(("op", "args", "kwargs"), BAD)
def test_fakes_refuse_what_the_registered_op_does(
    op: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    ensure_schemas()
    with pytest.raises(RuntimeError):
        getattr(torch.ops.npu, op)(*args, **kwargs)
    with pytest.raises(RuntimeError, match=f"npu::{op}: "):
        FAKES[op](*args, **kwargs)


def test_format_and_packing_have_fakes() -> None:
    ensure_schemas()
    with FakeTensorMode():
        w = torch.empty(64, 32, dtype=I32)
        assert signature(torch.ops.npu.npu_format_cast(w, 29)) == ((64, 32), I32)
        assert signature(torch.ops.npu.npu_convert_weight_to_int4pack(w)) == ((64, 4), I32)


def test_rules_of_the_chip_that_is_planned_for() -> None:
    if ensure_schemas() == "torch_npu":
        pytest.skip("the fakes are torch_npu's")
    args = (t(17, 64, dtype=I8), t(64, 65536, dtype=I8), t(65536, dtype=F32))
    torch.ops.npu.npu_quant_matmul(*args, **token)
    with planning_for(parse_chip("Ascend910B2,cann=9.0")), pytest.raises(RuntimeError, match="limit 65535"):
        torch.ops.npu.npu_quant_matmul(*args, **token)
    with planning_for(parse_chip("Ascend910B2,cann=9.1")):
        torch.ops.npu.npu_quant_matmul(*args, **token)


def test_guards_give_empty_results() -> None:
    ensure_schemas()
    x, w = torch.empty(0, 64, dtype=I8), torch.zeros(64, 32, dtype=I8)
    out = torch.ops.fxquant_npu.npu_quant_matmul(
        x, w, torch.ones(32), pertoken_scale=torch.empty(0), output_dtype=15
    )
    assert signature(out) == ((0, 32), BF16)
    codes, scale = torch.ops.fxquant_npu.npu_dynamic_quant(torch.empty(0, 64, dtype=F16))
    assert signature([codes, scale]) == [((0, 64), I8), ((0,), F32)]
    for name in GUARDED:
        assert (
            str(getattr(torch.ops.fxquant_npu, name).default._schema).partition("(")[2]
            == expected(name).partition("(")[2]
        )


def test_codes() -> None:
    assert [dtype_code(d) for d in (I8, I32, F16, F32, BF16, E4M3)] == [1, 3, 5, 6, 15, 24]
    assert CODES[293] == "float8_e8m0fnu"


LATE = """
import pathlib, sys
sys.path.insert(0, {folder!r})
from fxquant.targets.npu_schemas import ensure_schemas
import importlib.util
{first}
print(ensure_schemas())
assert importlib.util.find_spec("torch_npu") is not None
try:
    import torch_npu
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("first", ["", "import torch_npu"])
def test_later_import_of_torch_npu(tmp_path: Path, first: str) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(
        "import torch\nlib = torch.library.Library('npu', 'FRAGMENT')\n"
        + "".join(f"lib.define({name + text!r})\n" for name, text in SCHEMAS.items())
    )
    code = LATE.format(folder=str(tmp_path), first=first)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if first:
        assert done.stdout == "torch_npu\n"
    else:
        assert done.stdout.startswith("fxquant\ntorch_npu cannot be imported in this process any more")
        assert "Import it first" in done.stdout
