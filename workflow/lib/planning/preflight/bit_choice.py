"""Which linears stay in 16 bits (`quantize.keep: auto`): those that cost most loss per byte in 4
bits, as many as the chosen plan's GPUs hold.

Kept sets are beginnings of one order, by nats per weight. Micro-batch and memory options are those
of the plan in NF4. Peaks lie on a line between none and all in 16 bits, until the chosen set is
recorded. A set that makes the step slower is not taken. All linears may also fit with other memory
options: that plan is taken if it is as fast, since 16 bits need no decoding, and else told."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from workflow.lib.artifacts.preflight_record import BitCurve, BitPoint
from workflow.lib.artifacts.records import Sensitivities
from workflow.lib.model.architecture.kept_linears import exact_patterns
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.memory.peaks import Peaks, combined
from workflow.lib.planning.model_sizes import weights_by_path
from workflow.lib.planning.preflight.plan_search import (
    NEGLIGIBLE,
    Candidate,
    Question,
    Recorder,
    predicted_candidate,
    recorded,
)
from workflow.lib.settings.train import ALL_LINEARS
from workflow.lib.step_plan.memory_options import takes_host_memory
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import UserError
from workflow.lib.system.units import GIB

OWN_KINDS = ("training", "text")  # of the user's own text (`quantization.sensitivity`)
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)  # of the shown curve
MOST_RECORDINGS = 4  # of sets, each 7 to 60 s


def costs_of(record: Sensitivities) -> dict[str, float]:
    """Return nats a token by weight: half of the user's own kinds of text, half of the others. By
    chats alone an order did not pay on other text beyond a fifth of the weights
    (docs/results.md)."""
    own = [costs for kind, costs in record.nats.items() if kind in OWN_KINDS]
    others = [costs for kind, costs in record.nats.items() if kind not in OWN_KINDS]
    groups = [group for group in (own, others) if group]
    paths = dict.fromkeys(path for group in groups for costs in group for path in costs)
    means = [{p: sum(x.get(p, 0.0) for x in group) / len(group) for p in paths} for group in groups]
    return {path: sum(mean[path] for mean in means) / len(means) for path in paths}


@dataclass(frozen=True)
class BitOrder:
    """Weights in the order in which they get 16 bits, with their numbers and costs."""

    paths: Sequence[str]
    sizes: Sequence[int]
    costs: Sequence[float]

    @classmethod
    def of(cls, costs: Mapping[str, float], shape: ModelShape) -> "BitOrder":
        """Raises `UserError` for costs of another model."""
        sizes = weights_by_path(shape)
        if unknown := sorted(costs.keys() - sizes.keys()):
            raise UserError(
                f"the sensitivities have {unknown[0]}, the model has not: they belong to another "
                "model. Delete their file below results/sensitivities: it is made again."
            )
        # Unmeasured ones, outside of the layers, come last.
        paths = sorted(sizes, key=lambda path: -costs.get(path, 0.0) / sizes[path])
        return cls(paths, [sizes[p] for p in paths], [costs.get(p, 0.0) for p in paths])

    @cached_property
    def weights(self) -> list[int]:
        """Weights in 16 bits, by the number of kept linears and stacks."""
        return [0, *accumulate(self.sizes)]

    @cached_property
    def nats(self) -> list[float]:
        """Nats that the others cost, by the number of kept ones."""
        won = accumulate(self.costs)
        return [sum(self.costs), *(max(0.0, sum(self.costs) - x) for x in won)]

    def share(self, count: int) -> float:
        """The share of all weights that `count` linears and stacks are."""
        return self.weights[count] / self.weights[-1]

    def plan(self, plan: StepPlan, count: int) -> StepPlan:
        """Return a plan that keeps the first `count`."""
        every = count == len(self.paths)
        kept = ALL_LINEARS if every else exact_patterns(self.paths[:count])
        return replace(plan, kept=kept)


@dataclass
class _BitLine:
    """Peaks of plans with `share` of the weights in 16 bits, by a line."""

    none: Peaks
    all: Peaks
    share: float = 0.0

    def of(self, plan: StepPlan) -> Peaks:
        """Return the peaks of a plan."""
        return combined([(self.none, 1 - self.share), (self.all, self.share)])


@dataclass(frozen=True)
class BitChoice:
    """The candidate with the chosen set, and the curve."""

    candidate: Candidate
    curve: BitCurve


def choose_bits(
    question: Question, chosen: Candidate, order: BitOrder, record: Recorder, *, estimate: bool
) -> BitChoice:
    """Return the chosen NF4 plan with the best set that fits and is as fast. estimate: by lines
    alone."""
    (most,) = record.peaks([order.plan(chosen.plan, len(order.paths))])
    line, excess_bytes = _BitLine(chosen.peaks, most), 0
    on_line = replace(question, peaks=line)

    def at(count: int) -> Candidate:
        line.share = order.share(count)
        plan = order.plan(chosen.plan, count)
        by_line = predicted_candidate(on_line, plan, unasked=takes_host_memory(plan))
        excess = excess_bytes if count else 0
        return replace(by_line, lacking_bytes=by_line.lacking_bytes + excess)

    def is_worse(count: int) -> bool:
        candidate = at(count)
        return not candidate.fits or not as_fast(candidate, chosen)

    best, kept = chosen, 0
    for _ in range(MOST_RECORDINGS):
        count = bisect_left(range(1, len(order.paths) + 1), True, key=is_worse)
        if count <= kept:
            break
        expected = at(count)
        if estimate:
            best, kept = expected, count
            break
        tried = recorded(expected, limits=question.limits, record=record)
        if tried.fits:
            best, kept = tried, count
        # an allocator's reserve grows in steps, by the order of its requests
        excess_bytes += tried.lacking_bytes - expected.lacking_bytes
    counts = sorted({*(_count_at(order, share) for share in SHARES), kept})
    points = [_point(order, count, at(count), chosen, taken=count == kept) for count in counts]
    return BitChoice(best, BitCurve(kept=kept, weights=len(order.paths), points=points))


def as_fast(candidate: Candidate, other: Candidate) -> bool:
    """Whether a plan's step is not slower than another's, as far as predictions tell."""
    return candidate.step_s <= other.step_s * (1 + NEGLIGIBLE)


def with_all(curve: BitCurve) -> BitCurve:
    """Return the curve where another plan that is as fast holds all linears in 16 bits."""
    fits = [
        x if x.verdict != "taken" else x.model_copy(update={"verdict": "fits"})
        for x in curve.points
    ]
    last = fits[-1].model_copy(update={"verdict": "taken, with other memory options"})
    return curve.model_copy(update={"kept": curve.weights, "points": [*fits[:-1], last]})


def _count_at(order: BitOrder, share: float) -> int:
    """Return how many linears and stacks are at most this share of the weights."""
    return bisect_left(order.weights, share * order.weights[-1] + 1) - 1


def _point(
    order: BitOrder, count: int, candidate: Candidate, chosen: Candidate, *, taken: bool
) -> BitPoint:
    slower = candidate.step_s / chosen.step_s - 1 if chosen.step_s else 0.0
    verdict = "taken" if taken else "fits"
    if candidate.lacking_bytes > 0:
        verdict = f"{candidate.lacking_bytes / GIB:.2f} GiB too much"
    elif not candidate.fits:
        verdict = f"{candidate.lacking_host_bytes / GIB:.2f} GiB of host memory too much"
    elif slower > NEGLIGIBLE:
        verdict = f"{slower:.1%} slower"
    return BitPoint(
        share=order.share(count),
        peak_bytes=candidate.peak_bytes,
        nats=order.nats[count],
        verdict=verdict,
    )
