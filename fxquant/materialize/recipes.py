"""The load graph: a table of templates and bindings.

A *recipe* computes the constants of one weight from the tensors that the checkpoint stores. Its
*template* is a small FX graph whose placeholders ``r0, r1, ...`` are the reads; equal templates are
kept once, and a recipe binds one to its keys. Casting, merging, transposing and quantizing a weight
are nodes of the template.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, fx

from fxquant import ops as _ops  # noqa: F401 - registers the dialect
from fxquant.capture import make_fake_mode
from fxquant.errors import WeightMismatchError
from fxquant.form import Form
from fxquant.graph import dump, placeholders, value
from fxquant.materialize.experts import Slice, cut_experts
from fxquant.materialize.row_rules import NotSeparableError
from fxquant.materialize.tiles import writes
from fxquant.numerics import block_size

fxq = torch.ops.fxquant

Shapes = tuple[tuple[torch.Size, torch.dtype], ...]
Bound = tuple[int | None, int, tuple[tuple[int, Slice | None], ...]]
"""An expert, its template, and for each read the position of the stored tensor and what of it is taken."""

log = logging.getLogger("fxquant.materialize")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What a recipe reads: keys with dtypes and shapes; the last ``same`` of them must equal the value.

    ``convert`` makes the model's tensor of the others; None is the first as it is. Conversions with
    an equal ``template`` attribute do the same, so that one template serves all layers. ``stored``:
    the reads are the constants themselves.
    """

    keys: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    same: int = 0
    convert: Callable[..., Tensor] | None = None
    stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the constants of one weight are made: a template bound to keys."""

    fqn: str
    constants: tuple[str, ...]
    template: int
    keys: tuple[str, ...]
    laid_out: Form | None = None
    """The form whose parts the template's codes go into; None: the results are the constants."""
    host: bool = False
    """The constants are in main memory, whatever the device."""
    given: tuple[float | None, ...] = ()
    """Values of the last constants, each of one element, that are not made of the weight; None: kept."""
    nz: int = 0
    """The first constants, this many of them, are cast to FRACTAL_NZ once they are whole, on an NPU."""
    held: Form | None = None
    """The form as which the constants are held once they are whole; None: as they are made."""
    expert: int | None = None
    """Its results are this index of constants of ``experts`` along their first axis."""
    experts: int = 0
    slices: tuple[Slice | None, ...] = ()
    """What of each stored tensor is read; empty, and None: all of it."""

    @property
    def label(self) -> str:
        """The weight's name, and which of its experts: the recipe's own name."""
        return self.fqn if self.expert is None else f"{self.fqn}[{self.expert}]"

    def slice(self, read: int) -> Slice | None:
        """What of the stored tensor is read."""
        return self.slices[read] if self.slices else None

    def start(self, read: int) -> int:
        """The first byte, in the stored tensor, of what is read."""
        taken = self.slice(read)
        return 0 if taken is None else taken.start

    def taken(self, read: int, stored: Tensor) -> Tensor:
        """What is read of a stored tensor in memory."""
        taken = self.slice(read)
        return stored if taken is None else stored[taken.index]

    def stored_shape(self, read: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the stored tensor, of which ``shape`` is read."""
        taken = self.slice(read)
        return tuple(shape) if taken is None else (taken.count, *shape)

    def shapes(self, results: Shapes) -> Shapes:
        """Shapes of the constants, by those of the template's results."""
        shapes = results if self.laid_out is None else laid_out_shapes(self.laid_out, results)
        lead = (self.experts,) if self.experts else ()
        return tuple((torch.Size((*lead, *shape)), dtype) for shape, dtype in shapes)


@dataclass(slots=True, kw_only=True)
class LoadGraph:
    """All recipes in loading order, over deduplicated templates."""

    templates: list[fx.GraphModule] = field(default_factory=list)
    recipes: list[Recipe] = field(default_factory=list)
    _by_text: dict[str, int] = field(default_factory=dict)
    _by_shape: dict[tuple[object, ...], int] = field(default_factory=dict)
    _by_experts: dict[tuple[object, ...], tuple[Bound, ...]] = field(default_factory=dict)

    def add(
        self,
        fqn: str,
        reads: Reads,
        *,
        dtype: torch.dtype,
        form: Form | None,
        given: Mapping[str, float] = MappingProxyType({}),
        experts: bool = False,
    ) -> Recipe:
        """Append the recipe of one weight; its template is made or found.

        ``given``: values of the form's constants that are not made of the weight. ``experts``: the weight
        is ``[E, N, K]``, and gets a recipe for each of its matrices, the last of which is returned.
        """
        if experts and form is not None and not form.host and not reads.stored:
            return self._add_experts(fqn, reads, dtype, form)
        host = form is not None and form.host
        index = self._find(fqn, reads, dtype, None if host else form)
        constants = form.constants if form else ("value",)
        parts = form is not None and not reads.stored and not host and (form.kn or len(form.codes) > 1)
        recipe = Recipe(
            fqn=fqn,
            constants=constants,
            template=index,
            keys=reads.keys,
            laid_out=form if parts else None,
            host=host,
            given=() if form is None or reads.stored else tuple(given.get(name) for name in form.given),
            nz=len(form.codes) if form is not None and form.nz else 0,
            held=form if form is not None and form.held else None,
        )
        self.recipes.append(recipe)
        return recipe

    def _add_experts(self, fqn: str, reads: Reads, dtype: torch.dtype, form: Form) -> Recipe:
        key = (_how(reads), reads.dtypes, reads.shapes, dtype, form)
        bound = None if reads.same else self._by_experts.get(key)
        if bound is None:
            bound = self._bind_experts(fqn, reads, dtype, form)
        if not reads.same:
            self._by_experts[key] = bound
        self.recipes += [
            Recipe(
                fqn=fqn,
                constants=form.constants,
                template=template,
                keys=tuple(reads.keys[position] for position, _ in taken),
                expert=expert,
                experts=0 if expert is None else len(bound),
                held=form if form.held else None,
                slices=tuple(part for _, part in taken),
            )
            for expert, template, taken in bound
        ]
        return self.recipes[-1]

    def _bind_experts(self, fqn: str, reads: Reads, dtype: torch.dtype, form: Form) -> tuple[Bound, ...]:
        """The template of each expert, and what it reads; of all at once if they are mixed."""
        whole = _template(fqn, reads, lambda weight: (weight,))
        try:
            experts = cut_experts(whole)
        except NotSeparableError as error:
            log.info("%s is not made expert by expert: %s", fqn, error)
            gm = _template(fqn, reads, lambda weight: _stacked(weight, dtype, form))
            return ((None, self._keep(gm), tuple((i, None) for i in range(len(reads.keys)))),)
        known: dict[tuple[object, ...], int] = {}
        found: list[Bound] = []
        for i, expert in enumerate(experts):
            if expert.structure not in known:
                gm = _trace(lambda *t, expert=expert: _constants(expert.make(*t), dtype, form), expert.vals)
                known[expert.structure] = self._keep(gm)
            found.append((i, known[expert.structure], expert.reads))
        return tuple(found)

    def _find(self, fqn: str, reads: Reads, dtype: torch.dtype, form: Form | None) -> int:
        how = _how(reads)
        simple = not reads.same
        plain = form.in_one_part if form is not None else None
        shape_key = (how, reads.stored, reads.dtypes, reads.shapes, dtype, plain)
        if simple and shape_key in self._by_shape:
            return self._by_shape[shape_key]
        index = self._keep(make_template(fqn, reads, dtype=dtype, form=form))
        if simple:
            self._by_shape[shape_key] = index
        return index

    def _keep(self, gm: fx.GraphModule) -> int:
        """The place of a template in the table, where one with the same text may be already."""
        text = dump(gm)
        if gm.graph.find_nodes(op="get_attr"):  # values of tensors that it holds do not show in its text
            text = f"{text}\nholds tensors: template {len(self.templates)}"
        if text not in self._by_text:
            self._by_text[text] = len(self.templates)
            self.templates.append(gm)
        return self._by_text[text]

    def dump(self) -> str:
        """Stable text: the templates, then a line for each recipe."""
        parts = [f"template {i}:\n{_indent(dump(gm))}" for i, gm in enumerate(self.templates)]
        for recipe in self.recipes:
            names = ", ".join(f"{recipe.label}.{name}" for name in recipe.constants)
            taken = [recipe.slice(i) for i in range(len(recipe.keys))]
            keys = [f"{k}[{t.index}]" if t else k for k, t in zip(recipe.keys, taken, strict=True)]
            parts.append(f"{names} = template {recipe.template}({', '.join(keys)})")
        return "\n".join(parts)

    def print_readable(self) -> str:
        """The templates as code, then the recipes."""
        codes = [gm.print_readable(print_output=False) for gm in self.templates]
        return "\n".join([*codes, self.dump()])


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _how(reads: Reads) -> object:
    """Equal for conversions that do the same."""
    return None if reads.convert is None else getattr(reads.convert, "template", reads.convert)


def make_template(fqn: str, reads: Reads, *, dtype: torch.dtype, form: Form | None) -> fx.GraphModule:
    """Trace the recipe of a weight of ``dtype`` and ``form`` on fakes of what is read."""

    def finish(weight: Tensor) -> tuple[Tensor, ...]:
        if form is not None and form.kernel and tuple(weight.shape[2:]) != form.kernel:
            raise WeightMismatchError(
                f"{fqn} is the weight of a convolution with a kernel of {list(form.kernel)}, the checkpoint "
                f"gives {list(weight.shape)} (from {', '.join(reads.keys[: len(reads.keys) - reads.same])}). "
                "Check that the model's config belongs to this checkpoint."
            )
        return _constants(weight, dtype, form)

    return _template(fqn, reads, finish)


def _template(fqn: str, reads: Reads, finish: Callable[[Tensor], tuple[Tensor, ...]]) -> fx.GraphModule:
    """The recipe whose results are what ``finish`` makes of the weight."""
    plain = len(reads.keys) - reads.same

    def recipe(*tensors: Tensor) -> tuple[Tensor, ...]:
        if reads.stored:
            return tensors
        weight = reads.convert(*tensors[:plain]) if reads.convert else tensors[0]
        for key, other in zip(reads.keys[plain:], tensors[plain:], strict=True):
            fxq.check_same(weight, other, f"{fqn}: {reads.keys[0]} and {key}")
        return finish(weight)

    with make_fake_mode():
        fakes = [torch.empty(s, dtype=d) for s, d in zip(reads.shapes, reads.dtypes, strict=True)]
    return _trace(recipe, fakes)


def _trace(recipe: Callable[..., tuple[Tensor, ...]], fakes: Sequence[Tensor]) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    with fakes[0].fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        gm = make_fx(recipe)(*fakes)
        if any(writes(node) for node in gm.graph.nodes):
            # A source in memory hands out its own tensors.
            gm = make_fx(lambda *tensors: recipe(*(tensor.clone() for tensor in tensors)))(*fakes)
    assert isinstance(gm, fx.GraphModule)
    for i, node in enumerate(placeholders(gm)):
        node.target = node.name = f"r{i}"
    gm.recompile()
    return gm


def _constants(weight: Tensor, dtype: torch.dtype, form: Form | None) -> tuple[Tensor, ...]:
    """The constants of ``form`` for the model's float ``weight`` of ``dtype``."""
    if form is None:
        return (weight if weight.dtype == dtype else weight.to(dtype),)
    table = (weight.to(dtype),) if form.table else ()
    exact = torch.promote_types(weight.dtype, dtype) == dtype
    codes_source = weight if exact else weight.to(dtype)
    codes_source = form.as_matrix(codes_source)
    if form.rotated:
        codes_source = fxq.hadamard(codes_source.to(torch.float32), block_size(codes_source.shape[1]))
    return (*fxq.quantize_weight(codes_source, str(form.weight)), *table)


def _stacked(weight: Tensor, dtype: torch.dtype, form: Form) -> tuple[Tensor, ...]:
    """The constants of experts that are made together."""
    made = [_constants(expert, dtype, form) for expert in weight.unbind(0)]
    return tuple(torch.stack(parts) for parts in zip(*made, strict=True))


def result_vals(gm: fx.GraphModule) -> tuple[Tensor, ...]:
    """The fake constants that a template gives."""
    output = gm.graph.output_node().args[0]
    return tuple(value(node) for node in output)  # type: ignore[union-attr, arg-type]


def held_shapes(form: Form, shapes: Shapes) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The constants of ``form``, some of whose codes have these shapes, once the weight is whole."""
    n, k = form.whole_size([shape for shape, _ in shapes[: len(form.codes)]])
    experts = shapes[0][0][:-2]
    return form.shapes((*experts, *((k, n) if form.transposed else (n, k))), torch.float32)


def laid_out_shapes(form: Form, shapes: Shapes) -> Shapes:
    """Shapes of the constants whose codes lie in parts, from those of a template's results."""
    codes, dtype = shapes[0]
    n, columns = codes
    parts = ((torch.Size(size), dtype) for size in form.part_shapes(n, form.features(columns)))
    return (*parts, *shapes[1:])
