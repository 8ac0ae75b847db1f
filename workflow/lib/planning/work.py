"""A step's work on a GPU, as a recording counts it: FLOP, bytes and calls by kind.

A kind is a name of this module; then `@` and the base-2 logarithm of its FLOP per byte, if it has
any FLOP; `/` and the group of collectives; `beside`, if it runs on another stream than the
computation.

Lines between recordings (`recorded_peaks`) sum works with factors that may be negative, so seconds
must be linear in amounts (`step_time`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MATMUL, MATMUL_8, MATMUL_32 = "matmul", "matmul in 8 bits", "matmul in fp32"
GROUPED, GROUPED_8 = "matmul by experts", "matmul by experts in 8 bits"
ATTENTION, EQUAL, FLEX = "attention", "attention of equal lengths", "flex attention"
BROAD = "attention of heads above 128"
SHORT, WIDE = "attention of short documents", "attention by wide heads"
MASKED = "attention with masks"
DELTA_RULE, STATE_SPACE = "delta rule", "state space"
DECODE, MEMORY = "decoding", "memory"
GATHER, REDUCE, TO_HOST, FROM_HOST = "gather", "reduce", "to host", "from host"
BESIDE = " beside"
UPDATE = "optimizer_step"  # the phase


class Amount(NamedTuple):
    """Work of one kind."""

    flop: float = 0.0
    bytes: float = 0.0
    """Read and written; of collectives, bytes of the whole tensor."""
    calls: float = 0.0

    def plus(self, other: "Amount", times: float = 1.0) -> "Amount":
        """Return the sum with `times` the other."""
        return Amount(
            self.flop + times * other.flop,
            self.bytes + times * other.bytes,
            self.calls + times * other.calls,
        )


NOTHING = Amount()


@dataclass(frozen=True)
class Work:
    """Work of one process, by the phase of a step (of a micro-batch, or `UPDATE`) and the kind."""

    phases: Mapping[str, Mapping[str, Amount]] = field(default_factory=dict)

    @staticmethod
    def of(document: Mapping[str, Mapping[str, Sequence[float]]]) -> "Work":
        return Work(
            {
                phase: {kind: Amount(*x) for kind, x in amounts.items()}
                for phase, amounts in document.items()
            }
        )

    def stored(self) -> dict[str, dict[str, list[int]]]:
        """Return whole numbers by phase and kind, for JSON; `of` reads them."""
        return {
            phase: {kind: [*map(round, amount)] for kind, amount in amounts.items()}
            for phase, amounts in self.phases.items()
        }


def summed(parts: Iterable[tuple[Work, float]]) -> Work:
    """Return the sum of works, each times a factor."""
    sums: dict[str, dict[str, Amount]] = {}
    for work, factor in parts:
        for phase, amounts in work.phases.items():
            phase_sums = sums.setdefault(phase, {})
            for kind, amount in amounts.items():
                phase_sums[kind] = phase_sums.get(kind, NOTHING).plus(amount, factor)
    return Work(sums)
