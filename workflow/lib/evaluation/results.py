"""Measurements of two or three subjects as the JSON artifacts of the evaluation (fields:
docs/artifacts.md).

Everything here is computed anew from stored answers: intervals and p-values cost no model.
"""

import math
from collections.abc import Sequence
from typing import Any

from workflow.lib.artifacts.records import SUBJECT_LABELS
from workflow.lib.evaluation.bootstrap import estimate_ratio
from workflow.lib.evaluation.questions import Measurement, Questions
from workflow.lib.evaluation.task_scores import task_differences
from workflow.lib.settings.config import EvaluateConfig

Losses = Sequence[tuple[float, int]]


def artifacts(
    measured: dict[str, Measurement], questions: Questions, *, run: str
) -> dict[str, dict[str, Any]]:
    """Return the artifact of each subject, by name.

    measured: `base`, `tuned` and perhaps `merged`. Tuned and merged carry their comparison with the
    base, merged also
    `merging`: its comparison with tuned, which is what merging cost.
    """
    found = {name: _artifact(of, questions, name=name, run=run) for name, of in measured.items()}
    for name in found.keys() - {"base"}:
        found[name]["comparison"] = compare(measured["base"], measured[name], questions)
    if "merged" in found:
        found["merged"]["merging"] = compare(measured["tuned"], measured["merged"], questions)
    return found


def _artifact(
    measured: Measurement, questions: Questions, *, name: str, run: str
) -> dict[str, Any]:
    """Return the fields that all artifacts share."""
    return {
        "subject": name,
        "run": run,
        "heldout": _heldout(measured.losses, questions),
        "tasks": measured.tasks.scores,
        "samples": _samples(measured, questions),
    }


def _samples(measured: Measurement, questions: Questions) -> list[dict[str, Any]]:
    decode = questions.tokenizer.decode
    drawn: list[str] | list[None] = measured.drawn or [None] * len(questions.prompts)
    return [
        {
            "document": prompt.document,
            "prompt": decode(prompt.prompt),
            "reference": decode(prompt.reference, skip_special_tokens=True),
            "answer": answer,
            "drawn": other,
        }
        for prompt, answer, other in zip(questions.prompts, measured.answers, drawn, strict=True)
    ]


def _heldout(losses: Losses, questions: Questions) -> dict[str, Any] | None:
    if not losses:
        return None
    settings = questions.settings
    by_source = _by_source(losses, questions.sources)
    return {
        **_loss(losses, settings=settings),
        "sources": {name: _loss(some, settings=settings) for name, some in by_source.items()},
        "per_document": [
            {"document": number, "source": source, "loss_sum": loss_sum, "tokens": count}
            for number, source, (loss_sum, count) in zip(
                questions.losses_of, questions.sources, losses, strict=True
            )
        ],
    }


def _by_source(losses: Losses, sources: Sequence[str]) -> dict[str, list[tuple[float, int]]]:
    return {
        name: [entry for entry, source in zip(losses, sources, strict=True) if source == name]
        for name in sorted(set(sources))
    }


def _loss(losses: Losses, *, settings: EvaluateConfig) -> dict[str, Any]:
    """Return loss, interval (None for a single document), perplexity and counts."""
    sums, tokens = zip(*losses, strict=True)
    loss = sum(sums) / sum(tokens)
    ci95 = None
    if len(sums) >= 2:
        estimate = estimate_ratio(
            sums, tokens, resamples=settings.bootstrap_resamples, seed=settings.seed
        )
        ci95 = list(estimate.ci95)
    return {
        "loss": loss,
        "loss_ci95": ci95,
        "perplexity": math.exp(loss),
        "documents": len(sums),
        "trained_tokens": sum(tokens),
    }


def compare(before: Measurement, after: Measurement, questions: Questions) -> dict[str, Any]:
    """Return the paired comparison of two subjects on the same questions: an artifact's
    `comparison`.

    Loss differences are before - after and task differences after - before. Loss fields are None if
    no loss was measured, interval and p-value also for a single document.
    """
    settings = questions.settings
    pairs = list(zip(before.losses, after.losses, strict=True))
    by_source = {
        name: [
            pair for pair, source in zip(pairs, questions.sources, strict=True) if source == name
        ]
        for name in sorted(set(questions.sources))
    }
    return {
        **_loss_difference(pairs, settings=settings),
        "sources": {n: _loss_difference(p, settings=settings) for n, p in by_source.items()},
        "tasks": task_differences(
            before.tasks, after.tasks, resamples=settings.bootstrap_resamples, seed=settings.seed
        ),
    }


def _loss_difference(
    pairs: Sequence[tuple[tuple[float, int], tuple[float, int]]], *, settings: EvaluateConfig
) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(("loss_difference", "loss_difference_ci95", "p_value"))
    found["documents"] = len(pairs)
    gains = [before - after for (before, _), (after, _) in pairs]
    tokens = [count for (_, count), _ in pairs]
    if pairs:
        found["loss_difference"] = sum(gains) / sum(tokens)
    if len(pairs) >= 2:
        estimate = estimate_ratio(
            gains, tokens, resamples=settings.bootstrap_resamples, seed=settings.seed
        )
        found["loss_difference_ci95"] = list(estimate.ci95)
        found["p_value"] = estimate.p_value
    return found


def summary_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the comparisons as lines of text: what, before -> after, the signed difference and its
    interval.
    """
    lines = _comparison_lines(found["base"], found["tuned"], field="comparison")
    if "merged" in found:
        lines += _comparison_lines(found["tuned"], found["merged"], field="merging")
    return lines


def _comparison_lines(before: dict[str, Any], after: dict[str, Any], *, field: str) -> list[str]:
    old, new = (SUBJECT_LABELS[found["subject"]] for found in (before, after))
    label = "" if field == "comparison" else f"{new}: "
    lines = []
    if after["heldout"] is not None:
        losses = f"{before['heldout']['loss']:.4f} -> {after['heldout']['loss']:.4f}"
        found = after[field]
        gain = _signed(found["loss_difference"], found["loss_difference_ci95"], found["p_value"])
        lines.append(
            f"{label}held-out loss {losses}: {old} - {new} {gain}, {found['documents']} documents"
        )
    for task, metrics in after[field]["tasks"].items():
        for metric, paired in metrics.items():
            scores = [a["tasks"][task]["metrics"][metric]["value"] for a in (before, after)]
            gain = _signed(paired["difference"], paired["difference_ci95"], paired["p_value"])
            lines.append(
                f"{label}{task} {metric} {scores[0]:.4f} -> {scores[1]:.4f}: {new} - {old} {gain}"
            )
    return lines


def _signed(value: float, ci95: list[float] | None, p_value: float | None) -> str:
    interval = "no interval" if ci95 is None else f"95% interval {ci95[0]:+.4f} to {ci95[1]:+.4f}"
    return f"{value:+.4f} ({interval})" + ("" if p_value is None else f", p = {p_value:.2g}")
