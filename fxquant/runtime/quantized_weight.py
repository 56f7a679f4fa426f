"""A tensor that claims to be the float weight and holds its constants.

``QuantizedWeight`` keeps the shape, dtype and device of the parameter it replaces. A compiled graph
never sees it: the backend gives the graph its constants. Outside of compiled graphs ``F.linear``
runs the quantized op, and any other op computes with the float values that the codes stand for,
which is counted. What would be lost or wrong without a word raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # lazy: torch.compiler.disable imports Dynamo at once
from torch._guards import TracingContext
from torch.utils import _pytree as pytree
from typing_extensions import Self

from fxquant.errors import QuantizedWeightError
from fxquant.form import Form
from fxquant.fractal_nz import as_nd, to_nz
from fxquant.held import derive, unhold
from fxquant.passes.weight_uses import GROUPED
from fxquant.runtime.eager import quantized_embedding, quantized_linear, whole_codes
from fxquant.runtime.expert_weight import FLOATS_INSTEAD, index, product, select, transpose, unbind
from fxquant.runtime.float_values import dequantize_values, quantize_values, whole_shape
from fxquant.runtime.read_only import check_not_written, frozen
from fxquant.runtime.state import RunState, is_traced

aten = torch.ops.aten

NO_STORAGE = (
    "a quantized weight has no float storage ({what}). Save the constants with "
    "torch.save(model.state_dict(), path), or take float values with weight.dequantize()."
)


class QuantizedWeight(Tensor):
    """Codes and scales in the place of a float weight. See the module's docstring.

    Attributes: one for each constant of the form (``codes`` ``[N, K]``, or its parts ``codes_0``, ...;
    ``scale``; what else the scheme has; ``table``, the exact floats, or None), ``form``, and ``state``,
    the counters of the model it belongs to.
    """

    codes: Tensor
    scale: Tensor
    act_scale: Tensor | None
    table: Tensor | None
    form: Form
    state: RunState

    def __new__(
        cls,
        constants: tuple[Tensor, ...],
        form: Form,
        dtype: torch.dtype,
        state: RunState | None = None,  # noqa: ARG004 - for __init__
    ) -> Self:
        """A wrapper of the float weight's shape over ``constants``, in the order of the form."""
        shape = (*constants[0].shape[:-2], *form.own_shape(*whole_shape(constants, form)))
        return Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=constants[0].device, requires_grad=False
        )

    def __init__(
        self,
        constants: tuple[Tensor, ...],
        form: Form,
        dtype: torch.dtype,
        state: RunState | None = None,
    ) -> None:
        self.form = form
        self.table = self.act_scale = None
        for name, part in zip(form.constants, constants, strict=True):
            setattr(self, name, part)
        self.state = state or RunState()

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """The constants in the order of the form."""
        return tuple(getattr(self, name) for name in self.form.constants)

    def whole_codes(self) -> Tensor:
        """Codes ``[N, K]``: a view where they are in one part, else put together."""
        return whole_codes(self.parts, self.form)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The constants that hold codes."""
        return tuple(getattr(self, name) for name in self.form.codes)

    @property
    def whole(self) -> tuple[Tensor, ...]:
        """The constants of the weight alone, as its scheme has them, with its codes in one part."""
        names = self.form.weight.names[1:]
        codes = unhold(self.form, "codes", self.whole_codes())
        return (codes, *(unhold(self.form, name, getattr(self, name)) for name in names))

    def dequantize(self) -> Tensor:
        """A plain float tensor of the claimed shape and dtype: what the codes stand for."""
        return dequantize_values(self.whole, self.form, tuple(self.shape), self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return list(self.form.constants), (str(self.form), self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[str, torch.dtype], size: Any, stride: Any
    ) -> QuantizedWeight:
        form = Form.parse(context[0])
        return QuantizedWeight(tuple(inner[name] for name in form.constants), form, context[1])

    def like(self, constants: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> QuantizedWeight:
        """The same weight over other constants; a table follows ``dtype``."""
        dtype = dtype or self.dtype
        if self.form.table:
            named = zip(self.form.constants, constants, strict=True)
            constants = tuple(part.to(dtype) if name == "table" else part for name, part in named)
        return QuantizedWeight(constants, self.form, dtype, self.state)

    def over(self, constants: tuple[Tensor, ...], form: Form) -> QuantizedWeight:
        """A weight of the same model and dtype."""
        return QuantizedWeight(constants, form, self.dtype, self.state)

    def moved(self, place: torch.device) -> QuantizedWeight:
        """The same weight on another device."""
        return self.like(tuple(part.to(place) for part in self.constants))

    def as_parameter(self) -> nn.Parameter:
        """Itself as an ``nn.Parameter`` without a gradient."""
        return nn.Parameter(self, requires_grad=False)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes that are really held."""
        return sum(part.nbytes for part in self.constants)

    def share_memory_(self) -> QuantizedWeight:
        """Move the constants to shared memory."""
        for part in self.constants:
            part.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def pin_memory(self, *args: Any) -> QuantizedWeight:
        """The same weight over pinned constants."""
        return self.like(tuple(part.pin_memory(*args) for part in self.constants))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedWeight({list(self.shape)}, {self.dtype}, form={self.form}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        import copy

        if id(self) not in memo:
            state = copy.deepcopy(self.state, memo)
            parts = tuple(part.detach().clone() for part in self.constants)
            new: Tensor = QuantizedWeight(parts, self.form, self.dtype, state)
            memo[id(self)] = nn.Parameter(new, requires_grad=False) if isinstance(self, nn.Parameter) else new
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        is_parameter = isinstance(self, nn.Parameter)
        # Torch stores the bytes of a tensor, and those of FRACTAL_NZ are in another order.
        constants = tuple(as_nd(part) for part in self.constants) if self.form.nz else self.constants
        return rebuild_weight, (*constants, str(self.form), str(self.dtype), is_parameter)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        return _function(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


@_disable_dynamo
def _function(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function outside of compiled graphs."""
    if func is F.linear and _takes_codes(*args, **kwargs):
        return _linear(*args, **kwargs)
    _refuse(func, args)
    return torch._C._disabled_torch_function_impl(func, types, args, kwargs)


@_disable_dynamo
def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An ATen op on quantized weights."""
    if func is aten.convolution.default and _convolves(*args):
        return _convolution(*args)
    handler = HANDLERS.get(func)
    if handler is not None and isinstance(args[0], QuantizedWeight):
        result = handler(func, *args, **kwargs)
        if result is not FLOATS_INSTEAD:
            return result
    if func in PRODUCTS or func._schema.name in GROUPED:
        result = product(func, args, kwargs)
        if result is not FLOATS_INSTEAD:
            return result
    check_not_written(func, args, kwargs, (QuantizedWeight,))
    return _with_floats(func, args, kwargs)


def keep_out_of_dynamo() -> None:
    """Let Dynamo trace through the two hooks, but never start a frame of its own at them.

    They are called from C++ in code that Dynamo left to Python, where it would try to compile them.
    """
    from torch._dynamo.eval_frame import skip_code

    for hook in (QuantizedWeight.__torch_function__, QuantizedWeight.__torch_dispatch__):
        skip_code(hook.__func__.__code__)  # type: ignore[attr-defined]


def _takes_codes(input: Any, weight: Any, bias: Any = None) -> bool:  # noqa: A002 - as in F.linear
    return (
        isinstance(weight, QuantizedWeight)
        and not isinstance(input, QuantizedWeight)
        and not isinstance(bias, QuantizedWeight)
        and weight.dim() == 2
        and not weight.form.transposed
        and not weight.form.host
        and not weight.form.kernel
        and input.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


def _linear(input: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    if input.dtype != weight.dtype and not torch.is_autocast_enabled(input.device.type):
        raise RuntimeError(
            f"expected the input and the weight to have the same dtype, got {input.dtype} and {weight.dtype}"
        )
    weight.state.eager_linears += 1
    return quantized_linear(input, weight, bias, weight.state.kernels)


_STORAGE = (Tensor.untyped_storage, Tensor.data_ptr, Tensor.numpy, Tensor.storage)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SET_GRAD = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


def _refuse(func: Any, args: tuple[Any, ...]) -> None:
    """Raise for what cannot be carried out."""
    if func in _STORAGE and TracingContext.try_get() is None:  # a tracer describes its inputs
        raise QuantizedWeightError(NO_STORAGE.format(what=getattr(func, "__name__", func)))
    if func == Tensor.__setitem__ and isinstance(args[0], QuantizedWeight):
        raise QuantizedWeightError(
            "parts of a quantized weight cannot be written: use weight.copy_(values) with the whole of it."
        )
    if func == _SET_DATA:
        raise QuantizedWeightError(
            "`.data` of a quantized weight cannot be set: use weight.copy_(values), which quantizes them, "
            "or put a new nn.Parameter into the module."
        )
    if func in _SET_GRAD and (len(args) < 2 or args[1]):
        raise QuantizedWeightError(
            "a quantized weight takes no gradient; keep layers to be trained float with ignore=[...]."
        )


def _with_floats(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute with the float values and count it; inside of tracing nothing runs, so nothing counts."""
    traced = False

    def floats(leaf: Any) -> Any:
        nonlocal traced
        if not isinstance(leaf, QuantizedWeight):
            return leaf
        traced = traced or is_traced(leaf.constants[0])
        if not traced:
            _count(leaf, func)
        return leaf.dequantize()

    args, kwargs = pytree.tree_map(floats, (args, kwargs))
    result = func(*args, **kwargs)
    return result if traced else frozen(func, result)


def _count(weight: QuantizedWeight, func: Any) -> None:
    if weight.form.host:
        return  # whose values are floats
    name = f"{tuple(weight.shape)} in {func}"
    weight.state.fallbacks[name] += 1
    if weight.state.strict:
        raise QuantizedWeightError(f"strict: a quantized weight of shape {name} would compute in float")


def _over_constants(func: Any, weight: QuantizedWeight, *args: Any, **kwargs: Any) -> QuantizedWeight:
    """``detach``, ``clone``, ``alias``: the op on each constant."""
    return weight.like(tuple(func(part, *args, **kwargs) for part in weight.constants))


def _to_copy(func: Any, weight: QuantizedWeight, **kwargs: Any) -> Any:
    """Another device moves the constants; another float dtype changes only what is claimed."""
    dtype = kwargs.pop("dtype", None) or weight.dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return _with_floats(func, (weight,), {**kwargs, "dtype": dtype})
    kwargs.pop("memory_format", None)
    if weight.form.host:
        return weight.like(weight.constants, dtype).moved(torch.device(kwargs.get("device") or weight.device))
    return weight.like(tuple(func(part, **kwargs) for part in weight.constants), dtype)


def _empty_like(func: Any, weight: QuantizedWeight, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype") or weight.dtype
    device = kwargs.get("device") or weight.device
    return torch.empty(weight.shape, dtype=dtype, device=device)


def _copy_(func: Any, weight: QuantizedWeight, source: Tensor, non_blocking: bool = False) -> QuantizedWeight:
    """New values into the same constants: those of an equal form as they are, floats quantized."""
    if source.shape != weight.shape:
        raise QuantizedWeightError(f"cannot copy {list(source.shape)} into a weight of {list(weight.shape)}")
    if isinstance(source, QuantizedWeight) and source.form == weight.form:
        parts = source.constants
    else:
        floats = source.dequantize() if isinstance(source, QuantizedWeight) else source
        values = floats.to(weight.dtype)
        made = {"value": values} if weight.form.host else quantize_values(values, weight.form)
        made |= {name: getattr(weight, name).to(values.device) for name in weight.form.given}
        made |= {name: derive(weight.form, name, made) for name in weight.form.derived}
        parts = tuple(made[name] for name in weight.form.constants)
    for kept, new in zip(weight.constants, parts, strict=True):
        kept.copy_(new, non_blocking)
    return weight


def _lookup(func: Any, weight: QuantizedWeight, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Rows of the exact table, or of the codes."""
    if weight.table is not None:
        return func(weight.table, indices, *args, **kwargs)
    if weight.form.host or weight.form.kernel or weight.form.transposed:
        return _with_floats(func, (weight, indices, *args), kwargs)
    weight.state.eager_linears += not is_traced(weight.constants[0])
    return quantized_embedding(indices, weight, weight.shape[1], weight.dtype)


def _convolves(x: Any, weight: Any, bias: Any, *args: Any) -> bool:
    """Whether it is a convolution, not a transposed one, with a weight that was quantized for one."""
    others = isinstance(x, QuantizedWeight) or isinstance(bias, QuantizedWeight)
    return isinstance(weight, QuantizedWeight) and bool(weight.form.kernel) and not others and not args[3]


def _convolution(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, *args: Any) -> Any:
    """With the float values of its weight, as in the graphs."""
    weight.state.eager_linears += not is_traced(weight.constants[0])
    return aten.convolution.default(x, weight.dequantize(), bias, *args)


def _no_storage(func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise QuantizedWeightError(NO_STORAGE.format(what=func))


HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _over_constants,
    aten.alias.default: _over_constants,
    aten.clone.default: _over_constants,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy_,
    aten.select.int: select,
    aten.index.Tensor: index,
    aten.unbind.int: unbind,
    aten.transpose.int: transpose,
    aten.t.default: transpose,
    aten.embedding.default: _lookup,
    aten.set_.source_Storage: _no_storage,
}
"""Ops that a quantized weight answers with another quantized weight, or in its own way."""

PRODUCTS = (aten.mm.default, aten.bmm.default)
"""Products that run on codes where the weight's axes allow it; besides them those of ``GROUPED``."""


def rebuild_weight(*parts: Any) -> Tensor:
    """Undo ``QuantizedWeight.__reduce_ex__``."""
    *constants, text, dtype, is_parameter = parts
    form = Form.parse(text)
    if form.nz and constants[0].device.type == "npu":
        count = len(form.codes)
        constants[:count] = [to_nz(part) for part in constants[:count]]
    weight: Tensor = QuantizedWeight(tuple(constants), form, getattr(torch, dtype.removeprefix("torch.")))
    return nn.Parameter(weight, requires_grad=False) if is_parameter else weight


torch.serialization.add_safe_globals([rebuild_weight])
