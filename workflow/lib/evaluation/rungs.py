"""Runs that continue after a rung: those not surely worse than the best, by paired losses."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from workflow.lib.artifacts.evaluation_record import DocumentLoss
from workflow.lib.artifacts.records import Interval
from workflow.lib.artifacts.rungs import Decision
from workflow.lib.evaluation.task_scores import Loss, difference_fields
from workflow.lib.system.errors import UserError

Documents = Mapping[int, Loss]


def by_document(losses: list[DocumentLoss]) -> dict[int, Loss]:
    return {found.document: (found.loss_sum, found.tokens) for found in losses}


def decide(
    runs: Mapping[str, Documents], *, keep: float, resamples: int, seed: int
) -> list[Decision]:
    """Return the decisions, lowest loss first, in the order of `runs` if equal. runs: at least one,
    its loss by document. Raises `UserError` for runs of different documents."""
    losses = {name: _mean(documents) for name, documents in runs.items()}
    best, *others = sorted(runs, key=lambda name: losses[name])
    of_best: Any = {"behind": 0.0, "behind_ci95": (0.0, 0.0), "reason": "lowest loss"}
    decisions = [Decision(run=best, loss=losses[best], goes_on=True, **of_best)]
    most = max(1, math.ceil(round(keep * len(runs), 9)))  # 0.1 * 30 is above 3
    for name in others:
        pairs = _paired(name, runs[name], best, runs[best])
        found = difference_fields(pairs, resamples=resamples, seed=seed)
        ends: Interval | None = found["loss_difference_ci95"]
        worse = ends is not None and ends[0] > 0
        full = sum(before.goes_on for before in decisions) == most
        reason: Literal["not surely worse", "surely worse", "beyond keep"] = (
            "surely worse" if worse else "beyond keep" if full else "not surely worse"
        )
        decision = Decision(
            run=name,
            loss=losses[name],
            behind=found["loss_difference"],
            behind_ci95=ends,
            goes_on=reason == "not surely worse",
            reason=reason,
        )
        decisions.append(decision)
    return decisions


def _mean(documents: Documents) -> float:
    sums, tokens = zip(*documents.values(), strict=True)
    return float(sum(sums) / sum(tokens))


def _paired(name: str, own: Documents, best: str, its: Documents) -> list[tuple[Loss, Loss]]:
    tokens, others = ({d: count for d, (_, count) in of.items()} for of in (own, its))
    if tokens != others:
        raise UserError(
            f"runs {name} and {best} were measured on different held-out documents, so no rung can "
            "compare them. Give them the same data, or remove sweep.rungs."
        )
    return [(own[document], its[document]) for document in own]
