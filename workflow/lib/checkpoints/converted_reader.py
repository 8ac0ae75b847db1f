"""A checkpoint read under the names that the modules of its model have in Transformers.

Published files have other names, and one tensor a projection or expert where a module has a stack.
Transformers' own conversions are applied to one tensor, or one expert, at a time."""

import copy
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from workflow.lib.checkpoints.decoded_reader import DecodedReader
from workflow.lib.checkpoints.decoder_layers import ExpertStack, expert_stacks
from workflow.lib.checkpoints.files.safetensors_headers import TensorInfo
from workflow.lib.checkpoints.files.stack_names import StackNames
from workflow.lib.system.checksums import RecordedFile
from workflow.lib.system.errors import UserError


class ModuleNames:
    """The names that a model's modules have for the tensors of its checkpoints."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._prefix = model.base_model_prefix
        self._state: dict[str, Any] = model.state_dict()
        rules = get_model_conversion_mapping(model)
        owned = {name for name, _ in model.named_parameters()}
        self._tied: dict[str, str] = {
            name: other
            for pair in model.all_tied_weights_keys.items()
            for name, other in (pair, pair[::-1])
            if name not in owned and other in owned
        }
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self.converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    @cached_property
    def stacks(self) -> dict[str, ExpertStack]:
        """The stacks of experts by the path of their parameter."""
        return expert_stacks(self.model)

    @cached_property
    def expert_projections(self) -> set[str]:
        """Names of an expert's projections as separate modules (`gate_proj`, `w1`)."""
        return {
            pattern.removesuffix(".weight").rpartition(".")[2]
            for rule in self.converters
            if is_by_expert(rule)
            for pattern in rule.source_patterns
        }

    def peft(self, adapted: Collection[str]) -> StackNames:
        """Return PEFT's names of an adapter on the linears and stacks of these paths."""
        return StackNames(path for path in self.stacks if path in adapted)

    def of(self, stored: str) -> str:
        """Return the model's name for a stored tensor, or for a part's whole; else its own name."""
        return self.named(stored)[0]

    def owner(self, name: str) -> str:
        """Return the name of a tied tensor among a model's parameters."""
        return self._tied.get(name, name)

    def loaded_as(self, name: str) -> str:
        """Return PEFT's name for a linear's tensor when it loads an adapter, by the table."""
        return str(rename_source_key(name, self._renamings, [], self._prefix, self._state)[0])

    def named(self, stored: str) -> tuple[str, str | None]:
        """Return `of` a stored name, and the converter's pattern if the tensor is a part."""
        for renamings, converters in ((self._renamings, self.converters), ([], [])):
            name, pattern = rename_source_key(
                stored, renamings, converters, self._prefix, self._state
            )
            if name in self._state:
                return name, pattern
        return stored, None

    def made_of(self, stored: str) -> list[tuple[str, str | None]]:
        """Return `named` of all tensors of the model in a stored one: a tower's q, k and v are one
        in some checkpoints."""
        name, pattern = self.named(stored)
        targets = [] if pattern is None else self.converter({pattern}).target_patterns
        names = [name, *(name.replace(targets[0], other) for other in targets[1:])]
        return [(one, pattern) for one in names if one in self._state]

    def converter(self, patterns: Set[str | None]) -> WeightConverter:
        """Return the conversion of patterns; Kimi K2.5's table has its text part's twice."""
        return next(rule for rule in self.converters if patterns & {*rule.source_patterns})

    def size(self, name: str) -> tuple[int, ...]:
        """Return the shape that a tensor has in the model."""
        return tuple(self._state[name].shape)


class ConvertedReader(DecodedReader):
    """`DecodedReader` with the names of a model's parameters and buffers. left: stored names that
    no part of the model loads. A tied tensor appears once."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, TensorInfo],
        quantization: Mapping[str, Any],
        names: ModuleNames,
        *,
        recorded: Iterable[RecordedFile] = (),
        finite: bool = False,
    ) -> None:
        super().__init__(folder, tensors, quantization, recorded=recorded, finite=finite)
        self.module_names = names
        self._stored: dict[str, list[tuple[str, str | None]]] = {}
        """By name: its stored tensors, each with the converter's pattern."""
        self.left: list[str] = []
        for stored in sorted(super().names(), key=natural_order):
            made = self.module_names.made_of(stored)
            for name, pattern in made:
                self._stored.setdefault(name, []).append((stored, pattern))
            if not made:
                self.left.append(stored)
        for name in [name for name in self._stored if self.module_names.owner(name) != name]:
            parts = self._stored.pop(name)
            self._stored.setdefault(self.module_names.owner(name), parts)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def names(self) -> list[str]:
        """Return the names of all tensors, in order of shard and stored name."""
        order = {stored: number for number, stored in enumerate(super().names())}
        return sorted(self._stored, key=lambda name: order[self._stored[name][0][0]])

    def stored_in(self, parts: Iterable[str]) -> list[str]:
        """Return the stored names of all tensors of these modules."""
        starts = tuple(f"{path}." for path in parts)
        inside = (name for name in self.names() if name.startswith(starts))
        return [stored for name in inside for stored, _ in self._stored[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        if (only := self._only_stored(name)) is not None:
            return super().shape(only)
        self._check_parts(name)
        sources = {
            stored: torch.empty(super(ConvertedReader, self).shape(stored), device="meta")
            for stored, _ in self._stored[name]
        }
        return tuple(self._converted(name, sources).shape)

    def dtype(self, name: str) -> str:
        """Return safetensors' name of a tensor's type without reading it."""
        stored = self._stored.get(name)
        return super().dtype(stored[0][0] if stored else name)

    def tensor(self, name: str) -> torch.Tensor:
        if (only := self._only_stored(name)) is not None:
            return super().tensor(only)
        sources = {s: super(ConvertedReader, self).tensor(s) for s, _ in self._stored[name]}
        return self._converted(name, sources).contiguous()

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` of dim 0 (or experts); converted tensors are read whole."""
        if (only := self._only_stored(name)) is not None:
            return super().rows(only, start, stop)
        if is_by_expert(self._converter(name)) and start < stop:
            return torch.stack([*self.experts(name, start, stop)])
        return self.tensor(name)[start : max(start, stop)]

    def experts(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """Yield each expert's part of (experts, ., .), on the CPU, one at a time if unmixed."""
        if self._only_stored(name) is not None:
            yield from super().experts(name, start, stop)
            return
        if not is_by_expert(self._converter(name)):
            yield from self.tensor(name)[start:stop].unbind()
            return
        self._check_parts(name)
        for parts in [*zip(*self._by_pattern(name).values(), strict=True)][start:stop]:
            sources = {part: super(ConvertedReader, self).tensor(part) for part in parts}
            yield self._converted(name, sources)[0]

    def in_few_bits(self, name: str) -> bool:
        """Whether a weight, or a part of it, is stored in less than 8 bits."""
        return any(super(ConvertedReader, self).in_few_bits(s) for s, _ in self._stored[name])

    def nf4_state(self, name: str) -> dict[str, Any] | None:
        """Return bitsandbytes' JSON on a weight in NF4; None for another, or a part of one."""
        only = self._only_stored(name)
        return None if only is None else super().nf4_state(only)

    def nf4_parts(self, name: str) -> dict[str, torch.Tensor] | None:
        """Return the stored parts of a weight in NF4; None for another, or a part of one."""
        only = self._only_stored(name)
        return None if only is None else super().nf4_parts(only)

    def published(
        self, name: str, experts: Iterable[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield stored name and tensor of all parts of a stack's tensor, given its experts' parts
        in the model: the inverse of `experts`."""
        if (only := self._only_stored(name)) is not None:
            yield only, torch.stack([*experts])
            return
        converter, parts = self._converter(name), self._by_pattern(name)
        if is_by_expert(converter):
            columns = [parts[pattern] for pattern in converter.source_patterns]
            for stored, expert in zip(zip(*columns, strict=True), experts, strict=True):
                yield from zip(stored, _separated(expert, converter), strict=True)
            return
        yield from self.parts(name, torch.stack([*experts]))

    def parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield stored name and tensor of all parts of a model's tensor: the inverse of `tensor`.
        Conversions move elements; those of the elements' numbers tell where from."""
        if (only := self._only_stored(name)) is not None:
            yield only, tensor
            return
        shapes = {s: super(ConvertedReader, self).shape(s) for s, _ in self._stored[name]}
        sizes = [math.prod(shape) for shape in shapes.values()]
        numbers = torch.arange(sum(sizes)).split(sizes)
        sources = {s: x.view(shapes[s]) for s, x in zip(shapes, numbers, strict=True)}
        order = self._converted(name, sources).flatten()
        stored = torch.empty_like(tensor).flatten().index_copy(0, order, tensor.flatten())
        for part, values in zip(shapes, stored.split(sizes), strict=True):
            yield part, values.view(shapes[part])

    def untrained(self, parts: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield stored name and tensor (decoded, if packed) of these modules, and of all that no
        part of the model loads."""
        for stored in dict.fromkeys([*self.left, *self.stored_in(parts)]):
            yield stored, super().tensor(stored)

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the checkpoint by its stored name."""
        return {name: super(ConvertedReader, self).shape(name) for name in super().names()}

    def check_parts(self) -> None:
        """Raise `UserError` if experts of a stack, or projections of an expert, are missing."""
        for name in self._stored:
            if self._only_stored(name) is None:
                self._check_parts(name)

    def _check_parts(self, name: str) -> None:
        converter = self._converter(name)
        if not is_by_expert(converter):
            return
        parts, expected = self._by_pattern(name), self.module_names.size(name)[0]
        for pattern in converter.source_patterns:
            count = len(parts.get(pattern, ()))
            if count != expected:
                raise UserError(
                    f"{self.folder} has {count} tensors {pattern} for {name}, but config.json "
                    f"says {expected} experts. The download is not complete, or the files do not "
                    "belong together: check model.source."
                )

    def _by_pattern(self, name: str) -> dict[str | None, list[str]]:
        """The stored tensors of a name by the converter's pattern, in order of experts."""
        parts: dict[str | None, list[str]] = {}
        for stored, pattern in self._stored[name]:
            parts.setdefault(pattern, []).append(stored)
        return parts

    def _only_stored(self, name: str) -> str | None:
        """Return the stored name of a tensor loaded unchanged, or absent; None: converted."""
        if name not in self._stored:
            return name
        ((stored, pattern), *others) = self._stored[name]
        return stored if pattern is None and not others else None

    def _converted(self, name: str, sources: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return Transformers' conversion of the stored tensors of a name."""
        patterns, model = dict(self._stored[name]), self.module_names.model
        fresh: Any = copy.deepcopy(self._converter(name))
        for stored, tensor in sources.items():
            fresh.add_tensor(name, stored, patterns[stored], lambda tensor=tensor: tensor)
        made = fresh.convert(name, model=model, config=model.config)[name]
        whole: torch.Tensor = made[0] if isinstance(made, list) else made
        return whole

    def _converter(self, name: str) -> WeightConverter:
        """The converter of a converted name."""
        return self.module_names.converter({pattern for _, pattern in self._stored[name]})

    def divided(self, parts: Iterable[str]) -> str | None:
        """Return the first name outside of these modules whose stored tensor holds others, too."""
        starts = tuple(f"{path}." for path in parts)
        converted = (x for x in self._stored if self._only_stored(x) is None)
        divided = (x for x in converted if len(self._converter(x).target_patterns) > 1)
        return next((name for name in divided if not name.startswith(starts)), None)


def natural_order(name: str) -> str:
    """Return a key that sorts expert 10 after expert 9."""
    return re.sub(r"\d+", lambda number: number[0].zfill(9), name)


def is_by_expert(converter: WeightConverter) -> bool:
    """Tell whether a conversion stacks tensors of experts without mixing them."""
    first, *others = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(_within_expert(operation) for operation in others)
    )


def _separated(expert: torch.Tensor, converter: WeightConverter) -> list[torch.Tensor]:
    """Return an expert's stored tensors in the patterns' order."""
    pieces = [expert]
    for operation in reversed(converter.operations[1:]):
        if isinstance(operation, Concatenate):
            (joined,) = pieces
            pieces = [*joined.chunk(len(converter.source_patterns), dim=operation.dim - 1)]
        else:
            assert isinstance(operation, Transpose)
            pieces = [p.transpose(operation.dim0 - 1, operation.dim1 - 1) for p in pieces]
    return [piece.contiguous() for piece in pieces]


def _within_expert(operation: Any) -> bool:
    if isinstance(operation, Concatenate):
        return operation.dim > 0
    if isinstance(operation, Transpose):
        return not operation.check_dims and 0 not in (operation.dim0, operation.dim1)
    return False
