"""The runs side by side: one row a run, settings first, results after; as a table and as CSV.

Settings are read from training's `summary.json`: the configuration may have been edited since."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workflow.lib.artifacts.evaluation_record import Evaluation, TextLoss
from workflow.lib.artifacts.records import Interval
from workflow.lib.evaluation.intervals import Estimate, signed_ratio
from workflow.lib.report.run_results import Run, objective_words
from workflow.lib.settings.forms import SubjectName

Value = str | int | float | bool | None
# Columns with another name than the subject's: the measured base is in 4 bits.
COLUMN_NAMES: dict[SubjectName, str] = {"base": "nf4_base"}


@dataclass(frozen=True)
class Column:
    """One quantity over all runs. `differs`: the runs do not all have the same value."""

    name: str
    values: tuple[Value, ...]
    differs: bool


def setting_columns(runs: list[Run]) -> list[Column]:
    """Return the settings of each run: a column per setting, whether or not it differs."""
    chosen = [_settings(run) for run in runs]
    return [_column(name, chosen) for name in _names(chosen)]


def result_columns(runs: list[Run]) -> list[Column]:
    """Return the results: losses with intervals, tasks, speed, cost; None for a missing task."""
    behind = behind_best(runs)
    results = [_results(run) | _behind(behind.get(run.name)) | _task_results(run) for run in runs]
    return [_column(name, results) for name in _names(results)]


def comparison_csv(runs: list[Run]) -> str:
    """Return all settings and results as CSV, a row per run."""
    columns = [*setting_columns(runs), *result_columns(runs)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *(column.name for column in columns)])
    for index, run in enumerate(runs):
        writer.writerow([run.name, *(_cell(column.values[index]) for column in columns)])
    return text.getvalue()


def _cell(value: Value) -> Value:
    """Return text with a leading apostrophe if a spreadsheet would read it as a formula."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return "'" + value
    return value


def _names(rows: list[dict[str, Value]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _column(name: str, rows: list[dict[str, Value]]) -> Column:
    values = tuple(row.get(name) for row in rows)
    return Column(name, values, differs=len({repr(value) for value in values}) > 1)


def _settings(run: Run) -> dict[str, Value]:
    summary = run.summary
    return {
        "data": run.tokens_name,
        "seq_len": summary.seq_len,
        "num_steps": summary.num_steps,
        "processes": summary.processes,
        "device_name": summary.device_name,
        "micro_batch_size": summary.micro_batch_size,
        "accumulation_steps": summary.accumulation_steps,
        "trainable_parameters": summary.trainable_parameters,
        **flat(summary.settings.model_dump(mode="json")),
    }


def _results(run: Run) -> dict[str, Value]:
    summary, measured = run.summary, run.measured
    comparison = measured.comparison
    cost, forgot = measured.four_bits_cost, measured.forgetting
    losses = {
        k: v
        for evaluation in measured.subjects.values()
        for k, v in (_losses(evaluation) | _rewards(evaluation)).items()
    }
    return {
        "first_loss": summary.first_loss,
        "final_loss": summary.final_loss,
        "served": measured.served.subject,
        "reference": measured.reference.subject,
        **losses,
        **_estimated("four_bits_cost", cost.nats if cost else None, cost.ci95 if cost else None),
        **_estimated(
            "forgetting", forgot.nats if forgot else None, forgot.ci95 if forgot else None
        ),
        **_estimated(
            "heldout_loss_difference", comparison.loss_difference, comparison.loss_difference_ci95
        ),
        "heldout_p_value": comparison.p_value,
        "tokens": summary.tokens,
        "trained_tokens": summary.trained_tokens,
        "tokens_per_s": summary.tokens_per_s,
        "elapsed_s": summary.elapsed_s,
        "device_hours": summary.device_hours,
        "peak_bytes_predicted": summary.peak_bytes.predicted,
        "peak_bytes_measured": summary.peak_bytes.measured,
        "checks_passed": len(run.checks) - len(run.failed_checks),
        "checks": len(run.checks),
    }


def _losses(evaluation: Evaluation) -> dict[str, Value]:
    heldout = evaluation.heldout
    name = COLUMN_NAMES.get(evaluation.subject, evaluation.subject)
    return {
        **_estimated(f"{name}_heldout_loss", *_loss(heldout)),
        f"{name}_perplexity": heldout.perplexity if heldout else None,
        **_estimated(f"{name}_other_text_loss", *_loss(evaluation.other_texts)),
    }


def _loss(text: TextLoss | None) -> tuple[float | None, Interval | None]:
    return (None, None) if text is None else (text.loss, text.loss_ci95)


def _behind(estimate: Estimate | None) -> dict[str, Value]:
    value, ci95, p_value = (
        (None, None, None)
        if estimate is None
        else (estimate.value, estimate.ci95, estimate.p_value)
    )
    return _estimated("behind_best", value, ci95) | {"behind_best_p_value": p_value}


def _estimated(name: str, value: Value, ci95: Interval | None) -> dict[str, Value]:
    low, high = ci95 or (None, None)
    return {name: value, f"{name}_ci95_low": low, f"{name}_ci95_high": high}


def _rewards(evaluation: Evaluation) -> dict[str, Value]:
    if (rewards := evaluation.rewards) is None:
        return {}
    name, values = COLUMN_NAMES.get(evaluation.subject, evaluation.subject), dict[str, Value]()
    for key in ("accuracy", "margin", "chosen_log_ratio", "rejected_log_ratio"):
        column = f"{name}_{key}" if key.endswith("ratio") else f"{name}_reward_{key}"
        values |= _estimated(column, getattr(rewards, key), getattr(rewards, f"{key}_ci95"))
    return values


def _task_results(run: Run) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for score in run.measured.scores:
        paired, key = score.difference, f"{score.task}.{score.metric}"
        values |= {
            f"{key}.reference": score.before.value,
            f"{key}.reference_stderr": score.before.stderr,
            f"{key}.served": score.after.value,
            f"{key}.served_stderr": score.after.stderr,
            **_estimated(f"{key}.difference", paired.difference, paired.difference_ci95),
        }
    return values


def task_columns(runs: list[Run]) -> list[str]:
    return _names([{f"{s.task}.{s.metric}.served": None for s in r.measured.scores} for r in runs])


def comparable(runs: list[Run]) -> bool:
    """Tell whether all runs have the same held-out tokens and weights."""
    files = [run.manifest.files for run in runs]
    return len({(each.heldout_input_ids, each.heldout_weights) for each in files}) == 1


@dataclass(frozen=True)
class Ranking:
    """The measure that compares runs, in words, and each run's value, lowest first: with the
    summed loss and the size of each unit."""

    measure: str
    runs: list[tuple[float, Run, list[tuple[float, float]]]]


def ranking(runs: list[Run]) -> Ranking | None:
    """Return the order of the runs that have the measure; None for one run, or other documents.

    It is the loss of an example by the objective, as in the verdict, if all runs share objective,
    settings and start; a loss by another beta or teacher is another number. Then preferences are
    compared by the share of wrong rewards, other runs by the held-out loss."""
    if not comparable(runs):
        return None
    measured = [(run, run.measured.served) for run in runs]
    shared = (
        len({repr((objective_words(r.summary.settings), r.summary.lineage)) for r in runs}) == 1
    )
    measures = {
        "loss by the objective": [
            (own.loss, run, own.per_example)
            for run, served in measured
            if shared and (own := served.objective) is not None and own.per_example
        ],
        "share of right rewards": [
            (-rewards.accuracy, run, [(float(margin <= 0), 1.0) for margin in rewards.margins])
            for run, served in measured
            if (rewards := served.rewards) is not None
        ],
        "held-out loss": [
            (heldout.loss, run, [document.loss for document in heldout.per_document])
            for run, served in measured
            if (heldout := served.heldout) is not None
        ],
    }
    for measure, values in measures.items():
        if len(values) > 1:
            return Ranking(measure, sorted(values, key=lambda entry: entry[0]))
    return None


def best_run(runs: list[Run]) -> Run | None:
    ranked = ranking(runs)
    return None if ranked is None else ranked.runs[0][1]


def pairs_of(runs: list[Run]) -> int:
    """Return the number of pairs of runs."""
    return len(runs) * (len(runs) - 1) // 2


def behind_best(runs: list[Run]) -> dict[str, Estimate]:
    """Return by run its distance to the best one, paired: loss - the best's, or the best's share of
    right rewards - its own. The same documents chose the best, so intervals and p-values are
    corrected for all pairs of runs. Without runs of other documents."""
    if (ranked := ranking(runs)) is None:
        return {}
    (_, best, best_units), *others = ranked.runs
    return {
        run.name: signed_ratio(
            [one - two for (one, _), (two, _) in zip(units, best_units, strict=True)],
            [size for _, size in units],
            comparisons=pairs_of(runs),
        )
        for _, run, units in others
        if _documents(run) == _documents(best)
        and [s for _, s in units] == [s for _, s in best_units]
    }


def _documents(run: Run) -> list[tuple[int, int]]:
    heldout = run.measured.served.heldout
    return [(x.document, x.tokens) for x in heldout.per_document] if heldout else []


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Return settings by path: `{"lora": {"r": 16}}` gives `{"lora.r": 16}`; lists become text."""
    paths: dict[str, Value] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            paths |= flat(value, f"{prefix}{key}.")
        else:
            several = isinstance(value, list | tuple)
            paths[prefix + key] = " ".join(map(str, value)) if several else value
    return paths
