"""transformers' own conversion of checkpoint keys, on names only.

transformers stores many models in the layout of their first release and converts while it loads
(``conversion_mapping.py``, ``core_model_loading.py``; read at 5.24): renames, and converters that
merge or split tensors. Here the same objects are asked for the names, a dry run on meta tensors
tells which parameters a converter gives and in which shapes, and its operations become the
``convert`` of an entry. Tensors are not cast before they are converted; the loader casts results.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fxquant.checkpoint.base import TensorInfo
from fxquant.checkpoint.keymap_types import Answer, Source, View, Wanted, listed
from fxquant.errors import KeyMapError, WeightMismatchError

# What the operations raise on tensors that do not fit them.
_OPERATION_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class ParameterFacts(NamedTuple):
    """What the operations of a converter may ask of a parameter."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFacts:
    """Stands in for the model inside a conversion, so that no entry keeps the model alive."""

    parameters: Mapping[str, ParameterFacts]
    config: Any

    def get_parameter(self, name: str) -> ParameterFacts:
        """Shape and dtype of a parameter or buffer; AttributeError if there is none, as in torch."""
        found = self.parameters.get(name)
        if found is None:
            raise AttributeError(f"the model has no parameter {name!r}")
        return found

    get_buffer = get_parameter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversion:
    """The operations of one converter on the tensors of one place in the model.

    ``counts`` says how many of the tensors, in order, belong to each source pattern.
    """

    operations: tuple[Any, ...]
    source_patterns: tuple[str, ...]
    target_patterns: tuple[str, ...]
    counts: tuple[tuple[str, int], ...]
    layer: str
    facts: ModelFacts

    @property
    def rule(self) -> str:
        """Short text for the plan."""
        return "transformers: " + "+".join(type(operation).__name__ for operation in self.operations)

    @property
    def stacks(self) -> bool:
        """Whether it stacks the tensors of a list of modules, such as experts."""
        return any(type(operation).__name__ == "MergeModulelist" for operation in self.operations)

    def run(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """All results by FQN (the same steps as WeightConverter.convert)."""
        rest = iter(tensors)
        found: dict[str, Any] = {
            pattern: [next(rest) for _ in range(count)] for pattern, count in self.counts
        }
        for operation in self.operations:
            found = operation.convert(
                found,
                source_patterns=list(self.source_patterns),
                target_patterns=list(self.target_patterns),
                full_layer_name=self.layer,
                model=self.facts,
                config=self.facts.config,
                missing_keys=None,
            )
        results = {name: value[0] if isinstance(value, list) else value for name, value in found.items()}
        place = self.layer.replace("*.", "0.")
        for pattern in results:
            if pattern in place:
                before, _, after = place.partition(pattern)
                return {before + name + after: value for name, value in results.items()}
        return results


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConvertTo:
    """One result of a conversion, as the ``convert`` of an entry: plain tensor operations.

    Conversions with equal ``template`` do the same to tensors of the same shapes and dtypes, so
    that one trace serves every layer.
    """

    conversion: Conversion
    fqn: str
    template: tuple[object, ...]

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The tensor of ``fqn`` from the tensors of the entry's keys, in their order."""
        return self.conversion.run(tensors)[self.fqn]


@dataclass(slots=True, kw_only=True)
class _Collected:
    """Stored keys gathered for one converter at one place, by source pattern."""

    converter: Any
    keys: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersRules:
    """The conversions of one transformers model. ``ignored`` are patterns of keys to leave out."""

    model: Any
    facts: ModelFacts
    infos: Mapping[str, TensorInfo]
    ignored: tuple[str, ...]

    def answer(self, wanted: Wanted, view: View, *, title: str) -> Answer:
        """What transformers would load each name from, given these spellings of the keys."""
        names = {name for group in wanted.groups for name in group}
        renamed, collected = self._rename(view, names.union(self.facts.parameters))
        sources = {name: self._renamed_source(name, raw) for name, raw in renamed.items()}
        failures: dict[str, str] = {}
        for target, found in collected.items():
            for name, source in self._converted(target, found, failures):
                sources[name] = _settle(name, sources.get(name), source)
        return Answer(title=title, sources=sources, failures=failures)

    def _rename(
        self, view: View, names: set[str]
    ) -> tuple[dict[str, tuple[str, ...]], dict[str, _Collected]]:
        """Follow ``convert_and_load_state_dict_in_model`` up to where tensors would be touched."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping: list[Any] = get_model_conversion_mapping(self.model)
        renamings: list[Any] = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters: list[Any] = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        known: dict[str, Any] = dict.fromkeys(sorted(names), True)
        prefix = self.model.base_model_prefix
        renamed: dict[str, tuple[str, ...]] = {}
        collected: dict[str, _Collected] = {}
        for key in sorted(view, key=natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, pattern = rename_source_key(key, [], [], prefix, known)
            if name not in known:
                continue
            if pattern is None:
                renamed[name] = (*renamed.get(name, ()), *view[key])
            else:
                place = collected.setdefault(name, _Collected(converter=by_pattern[pattern]))
                place.keys.setdefault(pattern, []).extend(view[key][:1])
        return renamed, collected

    def _renamed_source(self, name: str, raw: tuple[str, ...]) -> Source:
        if name in raw:
            return Source(keys=(name,), same=tuple(key for key in raw if key != name))
        return Source(keys=raw[:1], same=raw[1:], rule="transformers: renamed")

    def _converted(
        self, target: str, found: _Collected, failures: dict[str, str]
    ) -> Iterator[tuple[str, Source]]:
        """Dry-run one converter; gives a source for each parameter that it fills."""
        keys = tuple(key for group in found.keys.values() for key in group)
        conversion = Conversion(
            operations=tuple(found.converter.operations),
            source_patterns=tuple(found.converter.source_patterns),
            target_patterns=tuple(found.converter.target_patterns),
            counts=tuple((pattern, len(group)) for pattern, group in found.keys.items()),
            layer=target,
            facts=self.facts,
        )
        inputs = [self._on_meta(key) for key in keys]
        try:
            for pattern, group in found.keys.items() if conversion.stacks else ():
                _check_numbers(pattern, group)
            results = conversion.run(inputs)
        except _OPERATION_ERRORS as error:
            failures[target] = f"{conversion.rule} of {listed(keys)} failed: {error}"
            if self._fits(target):
                yield target, Source(keys=(target,))
            return
        shapes = tuple(self.facts.parameters.get(name) for name in results)
        for position, (name, result) in enumerate(results.items()):
            if name not in self.facts.parameters:
                continue
            if result.shape != self.facts.parameters[name].shape and self._fits(name):
                yield name, Source(keys=(name,))
                continue
            template = (
                conversion.operations,
                conversion.source_patterns,
                conversion.target_patterns,
                conversion.counts,
                shapes,
                position,
            )
            yield (
                name,
                Source(
                    keys=keys,
                    convert=ConvertTo(conversion=conversion, fqn=name, template=template),
                    rule=conversion.rule,
                    problem=self._mismatch(name, result.shape, conversion.rule, keys),
                ),
            )

    def _mismatch(
        self, name: str, shape: torch.Size, rule: str, keys: tuple[str, ...]
    ) -> WeightMismatchError | None:
        expected = self.facts.parameters[name].shape
        if shape == expected:
            return None
        return WeightMismatchError(
            f"{name}: {rule} of {len(keys)} stored tensors ({listed(keys)}) gives shape {tuple(shape)}, "
            f"the model expects {tuple(expected)}; the checkpoint lacks some of them, or belongs to "
            "another configuration"
        )

    def _fits(self, name: str) -> bool:
        """Whether the name itself is stored in the model's layout already."""
        stored = self.infos.get(name)
        return stored is not None and stored.shape == self.facts.parameters[name].shape

    def _on_meta(self, key: str) -> torch.Tensor:
        info = self.infos[key]
        return torch.empty(info.shape, dtype=info.dtype, device="meta")


def _check_numbers(pattern: str, keys: Sequence[str]) -> None:
    """Refuse keys of a list of modules of which one is missing: the stack would move those behind it up."""
    parts = [re.split(r"(\d+)", key) for key in keys]
    differing = [column for column in zip(*parts, strict=False) if len(set(column)) > 1]
    if len(differing) != 1 or any(len(part) != len(parts[0]) for part in parts):
        return  # of several lists, or of one module: the shape of the result tells
    lost = [i for i in range(len(keys)) if str(i) not in differing[0]]
    if lost:
        raise ValueError(f"{pattern} is stored {len(keys)} times, but not for {lost[0]}")


def transformers_rules(
    model: torch.nn.Module | None, infos: Mapping[str, TensorInfo]
) -> tuple[TransformersRules | None, tuple[str, ...]]:
    """The rules of a transformers model, None for any other; and notes for the key map."""
    kinds = {(kind.__module__, kind.__name__) for kind in type(model).__mro__}
    if model is None or ("transformers.modeling_utils", "PreTrainedModel") not in kinds:
        return None, ()
    if importlib.util.find_spec("transformers.conversion_mapping") is None:
        return None, ("this transformers has no conversion mapping: update it if weights are missing",)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    facts = ModelFacts(
        parameters={name: ParameterFacts(tensor.shape, tensor.dtype) for name, tensor in tensors},
        config=model.config,
    )
    return TransformersRules(model=model, facts=facts, infos=infos, ignored=_ignored_keys(model, facts)), ()


def natural_key(key: str) -> tuple[tuple[int, str, int], ...]:
    """Order of keys in which experts 2 and 11 come as numbers (transformers' ``dot_natural_key``)."""
    return tuple(map(_natural_part, key.split(".")))


def _natural_part(part: str) -> tuple[int, str, int]:
    text = part.rstrip("0123456789")
    digits = part[len(text) :][-4000:]
    number = int(digits) if digits else -1
    return (0, "", number) if digits == part else (1, text, number)


def _settle(name: str, before: Source | None, source: Source) -> Source:
    """Two sources for one name are a conflict, unless they are the same tensor."""
    if before is None or before.keys == source.keys:
        return source
    problem = KeyMapError(
        f"{name} is stored twice: as {listed(before.keys)} ({before.rule}) and as {listed(source.keys)} "
        f"({source.rule}). Pass key_map to say which one is meant"
    )
    return Source(keys=source.keys, convert=source.convert, rule=source.rule, problem=problem)


def _ignored_keys(model: Any, facts: ModelFacts) -> tuple[str, ...]:
    """Patterns of stored keys that the class says to ignore, as ``from_pretrained`` reads them."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    if any(name.endswith("rotary_emb.inv_freq") for name in facts.parameters):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in facts.parameters):
        patterns.add(r"(^|\.)position_ids$")
    return tuple(sorted(patterns))
