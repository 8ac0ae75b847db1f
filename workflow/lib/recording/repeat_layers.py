"""Representative decoder layers of a model, a model of these alone, and the whole model's tape made
from it.

A layer's allocations depend on its kind and its neighbours. So a stretch in the middle is cut out
such that every layer, with its neighbours, has an equal one among the others. A phase's events are
fixed parts and passes through the layers. In the whole tape each layer has the events of its
stand-in, and a release names the tensor of the layer at the same distance."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.model.architecture.layer_choice import LayerChoice
from workflow.lib.model.host_embedding import other_tables
from workflow.lib.planning.memory.allocation_tape import EMPTY_CACHE, Tape
from workflow.lib.recording.layer_tape import NONE, LayerTape


class NotRepeatableError(Exception):
    """Equal layers make different requests, or reach further than assumed."""


@dataclass
class _Part:
    """A fixed part, or a pass: events by layer, in the order of the layers."""

    fixed: bool
    layers: dict[int, list[int | str]] = field(default_factory=dict)

    def takes(self, layer: int) -> bool:
        """Whether events of a layer, after those of this part, can belong to this pass."""
        if self.fixed or layer == NONE:
            return False
        *_, last = order = list(self.layers)
        upwards = len(order) < 2 or order[1] > order[0]
        downwards = len(order) < 2 or order[1] < order[0]
        return (upwards and layer > last) or (downwards and layer < last)

    @property
    def upwards(self) -> bool:
        """Whether the pass begins at the first layers."""
        order = list(self.layers)
        return order[0] <= order[-1]


class _Origin(NamedTuple):
    """Where a tensor is made: the part, the layer, and its number (`nth`) among tensors of its size
    and stream there. The first layers may make more, of other sizes, for all."""

    part: int
    layer: int
    num_bytes: int
    stream: str
    nth: int


def repeated(
    tape: LayerTape, recorded: Sequence[Hashable], all_kinds: Sequence[Hashable], *, reach: int
) -> Tape:
    """Return the tape of layers of `all_kinds` from the tape of the `recorded` ones. Raises
    `NotRepeatableError` if equal layers make different requests."""
    return _Repetition(tape, recorded, all_kinds, reach=reach).run()


class _Repetition:
    """The conversion of one tape to another."""

    def __init__(
        self,
        tape: LayerTape,
        recorded: Sequence[Hashable],
        kinds: Sequence[Hashable],
        *,
        reach: int,
    ) -> None:
        self._old, self._new = tape, Tape()
        self._count, self._total, self._reach = len(recorded), len(kinds), reach
        by_surroundings = stand_ins(recorded, reach=reach)
        self._alike = list(by_surroundings.values())
        self._stand_ins = [
            self._stand_in(kinds, layer, by_surroundings) for layer in range(self._total)
        ]
        self._parts = list(_parts(tape))
        self._origins = self._find_origins()
        self._freed = {~event for event in tape.events if isinstance(event, int) and event < 0}
        self._made: dict[_Origin, int] = {}
        self._old_of_new: dict[int, int] = {}  # old tensor of each new one

    def _stand_in(
        self, kinds: Sequence[Hashable], layer: int, by_surroundings: dict[Hashable, list[int]]
    ) -> int:
        if layer < EDGE:
            return layer
        if layer >= self._total - EDGE:
            return layer - self._total + self._count
        return by_surroundings[surroundings(kinds, layer, reach=self._reach)][0]

    def _find_origins(self) -> list[_Origin]:
        """Return the places of the old tensors, by number."""
        origins: dict[int, _Origin] = {}
        for number, part in enumerate(self._parts):
            for layer, events in part.layers.items():
                counts: Counter[tuple[int, str]] = Counter()
                for tensor in _made(events):
                    kind = (self._old.sizes[tensor], self._old.streams[tensor])
                    origins[tensor] = _Origin(number, layer, *kind, counts[kind])
                    counts[kind] += 1
        return [origins[tensor] for tensor in range(len(self._old.sizes))]

    def run(self) -> Tape:
        self._check_alike()
        for part in self._parts:
            for layer in [NONE] if part.fixed else self._order(part):
                self._play(part, layer)
        self._check_left()
        self._new.work = self._old.work_of(Counter(self._stand_ins))
        return self._new

    def _order(self, part: _Part) -> Sequence[int]:
        return range(self._total) if part.upwards else range(self._total - 1, -1, -1)

    def _play(self, part: _Part, layer: int) -> None:
        """Write a layer's events: its stand-in's."""
        old_layer = layer if layer == NONE else self._stand_ins[layer]
        for event in part.layers.get(old_layer, ()):
            if event == EMPTY_CACHE:
                self._new.empty_cache()
            elif isinstance(event, str):
                self._new.phase(event)
            elif event < 0:
                self._release(~event, old_layer, layer)
            else:
                self._make(event, layer)

    def _make(self, old: int, layer: int) -> None:
        tape, origin = self._old, self._origins[old]._replace(layer=layer)
        tensor = self._new.new(tape.sizes[old], tape.terms[old], tape.streams[old])
        self._made[origin] = tensor
        self._old_of_new[tensor] = old

    def _release(self, old: int, old_layer: int, layer: int) -> None:
        was = self._origins[old]
        tensor = self._made.get(was._replace(layer=self._moved(was.layer, old_layer, layer)), -1)
        if tensor not in self._old_of_new:
            raise NotRepeatableError(f"layer {layer} releases what is not there")
        del self._old_of_new[tensor]
        self._new.free(tensor)

    def _moved(self, tensor_layer: int, old_layer: int, layer: int) -> int:
        """Return the layer whose tensor is released, if `old_layer` releases `tensor_layer`'s."""
        if tensor_layer == NONE:
            return NONE
        if old_layer != NONE and abs(tensor_layer - old_layer) <= self._reach:
            return layer + tensor_layer - old_layer
        if tensor_layer < EDGE:
            return tensor_layer
        if tensor_layer >= self._count - EDGE:
            return tensor_layer + self._total - self._count
        raise NotRepeatableError(f"layer {old_layer} releases tensors of layer {tensor_layer}")

    def _check_alike(self) -> None:
        for alike in self._alike:
            first, *others = [[*self._events(layer)] for layer in alike]
            for other in others:
                differing = next(((x, y) for x, y in zip_longest(first, other) if x != y), None)
                if differing:
                    raise NotRepeatableError(f"layers {alike} do not ask for the same: {differing}")

    def _events(self, layer: int) -> Iterator[Hashable]:
        """Yield a layer's events, without its number."""
        for number, part in enumerate(self._parts):
            for event in part.layers.get(layer, ()):
                assert isinstance(event, int), "phases belong to no layer"
                origin = self._origins[max(event, ~event)]
                distance = origin.layer - layer
                if origin.layer != NONE and abs(distance) <= self._reach:
                    origin = origin._replace(layer=distance)
                yield number, event < 0, origin

    def _check_left(self) -> None:
        """Check that unreleased tensors are those that the stand-ins never release."""
        forgotten = [old for old in self._old_of_new.values() if old in self._freed]
        if forgotten:
            origin = self._origins[forgotten[0]]
            raise NotRepeatableError(f"what layer {origin.layer} makes is not released for all")


def _made(events: Sequence[int | str]) -> Iterator[int]:
    return (event for event in events if isinstance(event, int) and event >= 0)


def _parts(tape: LayerTape) -> Iterator[_Part]:
    """Divide a tape into fixed parts and passes."""
    part, current = _Part(fixed=True), NONE
    part.layers[NONE] = []
    for event, layer in zip(tape.events, tape.layers, strict=True):
        if layer != current and not part.takes(layer):
            yield part
            part = _Part(fixed=layer == NONE)
        current = layer
        part.layers.setdefault(layer, []).append(event)
    yield part


EDGE = 2  # layers at both ends, each its own representative
TYPES = (bool, int, str, type(None))


def layer_kinds(model: PreTrainedModel, choice: LayerChoice) -> list[int]:
    """Return the number of each layer's kind: equal modules and options. No two are equal if layers
    read from a particular other one."""
    types = getattr(model.config.get_text_config(), "layer_types", None)
    # Layers that share keys, or parts of a table (Gemma 3n, 4): none can be left out.
    shares = any(getattr(module, "is_kv_shared_layer", False) for module in model.modules())
    connected = shares or bool(other_tables(model))
    numbers: dict[Hashable, int] = {}
    return [
        numbers.setdefault(
            (
                _modules(layer),
                types[number] if types else None,
                number if connected else None,
                *(number in layers for layers in choice),
            ),
            len(numbers),
        )
        for number, layer in enumerate(decoder_layers(model))
    ]


def _modules(layer: nn.Module) -> Hashable:
    return tuple(
        (
            path,
            type(module).__name__,
            tuple((name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False)),
            tuple(
                (name, value)
                for name, value in vars(module).items()
                if isinstance(value, TYPES) and name != "layer_idx"
            ),
        )
        for path, module in layer.named_modules()
    )


def representatives(kinds: Sequence[Hashable], *, reach: int) -> list[int]:
    """Return the fewest layers, in their order, that represent all, and two equal neighbours; all
    layers if fewer cannot. reach: of layers to each other."""
    total = len(kinds)
    edge = max(EDGE, reach)
    for count in range(2 * edge + 2, total):
        for cut in range(edge + 1, count - edge + 1):
            left = [*range(cut), *range(cut + total - count, total)]
            if _stand_for_all(kinds, left, reach=reach):
                return left
    return [*range(total)]


def _stand_for_all(kinds: Sequence[Hashable], left: Sequence[int], *, reach: int) -> bool:
    by_surroundings = stand_ins([kinds[number] for number in left], reach=reach)
    return all(
        surroundings(kinds, number, reach=reach) in by_surroundings
        for number in range(EDGE, len(kinds) - EDGE)
    ) and any(len(alike) > 1 for alike in by_surroundings.values())


def stand_ins(kinds: Sequence[Hashable], *, reach: int) -> dict[Hashable, list[int]]:
    """Return the layers between the edges by their surroundings."""
    by_surroundings: dict[Hashable, list[int]] = {}
    for number in range(EDGE, len(kinds) - EDGE):
        by_surroundings.setdefault(surroundings(kinds, number, reach=reach), []).append(number)
    return by_surroundings


def surroundings(kinds: Sequence[Hashable], number: int, *, reach: int) -> Hashable:
    """Return the kinds of a layer and of its neighbours; None beyond the ends."""
    numbers = range(number - reach, number + reach + 1)
    return tuple(kinds[x] if 0 <= x < len(kinds) else None for x in numbers)


def keep_layers_(model: PreTrainedModel, numbers: Sequence[int]) -> None:
    """Remove all other decoder layers from a meta-device model."""
    layers = decoder_layers(model)
    wanted = [layers[number] for number in numbers]
    for index, layer in enumerate(wanted):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", index)  # noqa: B010
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ModuleList) and child[0] is layers[0]:
                setattr(module, name, nn.ModuleList(wanted))
    _cut_config_(model.config.get_text_config(), numbers, total=len(layers))


def _cut_config_(config: Any, numbers: Sequence[int], *, total: int) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == total:
            setattr(config, name, [value[number] for number in numbers])
    config.num_hidden_layers = len(numbers)
