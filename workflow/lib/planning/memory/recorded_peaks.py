"""Peaks of plans by a few recordings of the engine and straight lines between them.

In every phase bytes grow almost linearly with the rows of a micro-batch and with the share of
layers that keep activations; gathered weights, or offloaded layers, add the same to all plans. So
four recordings (few and more rows, the most and the fewest layers recomputed), and one or two for
each other option, predict every plan. A line only ranks: the chosen plan is recorded itself."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from workflow.lib.model.architecture.layer_choice import (
    Recomputation,
    activation_offload_layers,
    is_recomputed,
    recomputed_layers,
)
from workflow.lib.planning.memory.peaks import Peaks, combined
from workflow.lib.step_plan.plan import StepPlan

RecordPeaks = Callable[[Sequence[StepPlan]], list[Peaks]]
"""Returns the peaks of plans, recorded."""


class Point(NamedTuple):
    """The recorded values of the fields of a plan that a search varies."""

    micro_batch_size: int
    activation_checkpointing: Recomputation
    offload_activations: bool | int
    reshard_after_forward: bool
    offload_layers: int
    keep_decoded: int
    tile_tokens: int
    keep_attention: bool


APART = ("tile_tokens", "keep_attention")
"""Fields whose values have recordings of their own."""


class RecordedPeaks:
    """The peaks of all plans of a search; recordings are made when first needed."""

    def __init__(
        self,
        plan: StepPlan,
        record: RecordPeaks,
        *,
        rows: Sequence[int],
        levels: Sequence[Recomputation],
        num_layers: int,
    ) -> None:
        """plan: common to all plans, offloading least; rows, levels: the varied values."""
        self._plan, self._record, self._num_layers = plan, record, num_layers
        few = min(rows)
        self._few, self._more = few, min((n for n in rows if n > few), default=few)
        by_layers = sorted(levels, key=self._recomputed)
        self._least, self._most = by_layers[0], by_layers[-1]
        self._recorded: dict[Point, Peaks] = {}
        self._shares: dict[Hashable, float] = {}

    def of(self, plan: StepPlan) -> Peaks:
        """Return a plan's predicted peaks, corrected by the last recorded plan of its kind."""
        sums: dict[Point, float] = {}
        for point, weight in self._weights(plan):
            sums[point] = sums.get(point, 0.0) + weight
        weights = {point: weight for point, weight in sums.items() if weight}
        missing = [point for point in weights if point not in self._recorded]
        plans = [replace(self._plan, **point._asdict()) for point in missing]
        if plans:
            self._recorded |= dict(zip(missing, self._record(plans), strict=True))
        peaks = combined((self._recorded[point], weight) for point, weight in weights.items())
        share = self._shares.get(_kind(plan), 1.0)
        return replace(combined([(peaks, share)]), work=peaks.work)

    def correct(self, plan: StepPlan, recorded: Peaks) -> None:
        """Correct the lines by the recording of a plan."""
        self._shares.pop(_kind(plan), None)
        share = recorded.allocated_bytes / self.of(plan).allocated_bytes
        self._shares[_kind(plan)] = share

    def _recomputed(self, level: Recomputation) -> int:
        return len(recomputed_layers(level, self._num_layers))

    def _weights(self, plan: StepPlan) -> Iterator[tuple[Point, float]]:
        """Yield the recordings whose sum, each times a factor, is a plan's peak."""
        common = replace(self._plan, **{field: getattr(plan, field) for field in APART})
        others = (getattr(common, field) for field in Point._fields[2:])
        first = Point(self._few, self._most, *others)
        levels = list(self._levels(plan))
        for level, share in levels:
            point = first._replace(activation_checkpointing=level)
            for rows, row_share in self._rows(plan):
                yield point._replace(micro_batch_size=rows), share * row_share
        if plan.offload_activations != common.offload_activations:
            if len(levels) == 2:  # a recomputed layer shares the window with others
                for rows, row_share in self._rows(plan):
                    one = row_share / self._num_layers
                    yield Point(rows, self._least, *first[2:]), one
                    yield Point(rows, self._most, *first[2:]), -one
            for level, share in levels:
                point = Point(self._more, level, *first[2:])
                offloaded_share = (
                    share * self._offloaded_share(plan, level) * plan.micro_batch_size / self._more
                )
                yield point._replace(offload_activations=True), offloaded_share
                yield point, -offloaded_share
        kept = first._replace(reshard_after_forward=plan.reshard_after_forward)
        moved = plan.offload_layers != common.offload_layers
        share = plan.offload_layers / self._num_layers if moved else 0.0
        yield kept._replace(offload_layers=self._num_layers), share
        yield kept, 1 - share
        yield first, -1.0
        if plan.keep_decoded != common.keep_decoded:
            share = plan.keep_decoded / self._num_layers
            encoded = first._replace(activation_checkpointing=self._least)
            yield encoded._replace(keep_decoded=self._num_layers), share
            yield encoded, -share

    def _rows(self, plan: StepPlan) -> Iterator[tuple[int, float]]:
        if self._more == self._few:
            yield self._few, plan.micro_batch_size / self._few
            return
        more_share = (plan.micro_batch_size - self._few) / (self._more - self._few)
        yield self._few, 1 - more_share
        yield self._more, more_share

    def _levels(self, plan: StepPlan) -> Iterator[tuple[Recomputation, float]]:
        """Yield the two levels around a plan's, with their shares."""
        most, least = self._recomputed(self._most), self._recomputed(self._least)
        if most == least:
            yield self._most, 1.0
            return
        share = (self._recomputed(plan.activation_checkpointing) - least) / (most - least)
        yield from ((level, x) for level, x in ((self._most, share), (self._least, 1 - share)) if x)

    def _offloaded_share(self, plan: StepPlan, level: Recomputation) -> float:
        """Return the offloaded share of a level's layers of one kind."""
        chosen = plan.activation_checkpointing
        offloaded = activation_offload_layers(
            plan.offload_activations, recomputation=chosen, num_layers=self._num_layers
        )
        wanted = level == self._most
        like = [x for x in range(self._num_layers) if is_recomputed(chosen, x) == wanted]
        return len({*offloaded} & {*like}) / len(like) if like else 0.0


def _kind(plan: StepPlan) -> Hashable:
    return (
        plan.activation_checkpointing,
        plan.offload_activations,
        plan.reshard_after_forward,
        plan.offload_layers > 0,
        plan.keep_decoded > 0,
        *(getattr(plan, field) for field in APART),
    )
