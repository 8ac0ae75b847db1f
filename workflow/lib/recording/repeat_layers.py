"""The tape of a whole model, made from that of some of its layers (`some_layers`).

What a phase asks for falls into fixed parts and passes. A pass goes through the layers upwards or
downwards. In the tape of the whole model each layer has the events of the one that stands for it,
and a release names the tensor of the layer that is as many layers away."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from workflow.lib.planning.memory.allocation_tape import EMPTY_CACHE, Tape
from workflow.lib.recording.layer_tape import NONE, LayerTape
from workflow.lib.recording.some_layers import EDGE, stand_ins, surroundings


class NotRepeatableError(Exception):
    """Layers that should be alike ask for different things, or reach further than was thought."""


@dataclass
class _Part:
    """A fixed part, or a pass: events by layer, in the order of the layers."""

    fixed: bool
    layers: dict[int, list[int | str]] = field(default_factory=dict)

    def takes(self, layer: int) -> bool:
        """Whether events of a layer, which follow those that are here, can be of this pass."""
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


@dataclass(frozen=True)
class _Place:
    """Where a tensor is made: the part, the layer, and which one it is of the tensors of its size
    and stream that are made there. The first layers may make some more, of other sizes, for all."""

    part: int
    layer: int
    num_bytes: int
    stream: str
    index: int


def repeated(
    tape: LayerTape, recorded: Sequence[Hashable], all_kinds: Sequence[Hashable], *, reach: int
) -> Tape:
    """Return the tape of layers of `all_kinds` from that of the `recorded` ones. Raises
    `NotRepeatableError` if layers that are alike do not ask for the same."""
    return _Repetition(tape, recorded, all_kinds, reach=reach).run()


class _Repetition:
    """One tape on its way to another."""

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
        known = stand_ins(recorded, reach=reach)
        self._alike = list(known.values())
        self._stand_ins = [self._stand_in(kinds, layer, known) for layer in range(self._total)]
        self._parts = list(_parts(tape))
        self._places = self._find_places()
        self._freed = {~event for event in tape.events if isinstance(event, int) and event < 0}
        self._made: dict[_Place, int] = {}
        self._there: dict[int, int] = {}  # new tensors, and the old ones that they stand for

    def _stand_in(
        self, kinds: Sequence[Hashable], layer: int, known: dict[Hashable, list[int]]
    ) -> int:
        if layer < EDGE:
            return layer
        if layer >= self._total - EDGE:
            return layer - self._total + self._count
        return known[surroundings(kinds, layer, reach=self._reach)][0]

    def _find_places(self) -> list[_Place]:
        """Return the places of the old tensors, by number."""
        places: dict[int, _Place] = {}
        for number, part in enumerate(self._parts):
            for layer, events in part.layers.items():
                counts: Counter[tuple[int, str]] = Counter()
                for tensor in _made(events):
                    kind = (self._old.sizes[tensor], self._old.streams[tensor])
                    places[tensor] = _Place(number, layer, *kind, counts[kind])
                    counts[kind] += 1
        return [places[tensor] for tensor in range(len(self._old.sizes))]

    def run(self) -> Tape:
        """Return the new tape."""
        self._check_alike()
        for part in self._parts:
            for layer in [NONE] if part.fixed else self._order(part):
                self._play(part, layer)
        self._check_left()
        return self._new

    def _order(self, part: _Part) -> Sequence[int]:
        return range(self._total) if part.upwards else range(self._total - 1, -1, -1)

    def _play(self, part: _Part, layer: int) -> None:
        """Write the events of a layer, which are those of its stand-in."""
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
        tape, place = self._old, replace(self._places[old], layer=layer)
        tensor = self._new.new(tape.sizes[old], tape.terms[old], tape.streams[old])
        self._made[place] = tensor
        self._there[tensor] = old

    def _release(self, old: int, old_layer: int, layer: int) -> None:
        was = self._places[old]
        tensor = self._made.get(replace(was, layer=self._moved(was.layer, old_layer, layer)), -1)
        if tensor not in self._there:
            raise NotRepeatableError(f"layer {layer} releases what is not there")
        del self._there[tensor]
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
        """Yield what a layer does, without its number."""
        for number, part in enumerate(self._parts):
            for event in part.layers.get(layer, ()):
                assert isinstance(event, int), "phases belong to no layer"
                place = self._places[max(event, ~event)]
                away = place.layer - layer
                if place.layer != NONE and abs(away) <= self._reach:
                    place = replace(place, layer=away)
                yield number, event < 0, place

    def _check_left(self) -> None:
        """What is never released is what the stand-ins never release."""
        forgotten = [old for old in self._there.values() if old in self._freed]
        if forgotten:
            place = self._places[forgotten[0]]
            raise NotRepeatableError(f"what layer {place.layer} makes is not released for all")


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
