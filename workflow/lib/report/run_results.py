"""A run as the report sees it: its artifacts read, checked against each other, and paired.

Everything shown is in the artifacts; this module only refuses what does not belong together (a file
of another run, answers to other prompts) and sets NF4 base beside tuned. Drawing is in `figures`
and `paper_figures`, the table over runs in `comparison`, the page in `page`.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from workflow.lib.artifacts.evaluation_record import (
    Evaluation,
    MergedEvaluation,
    Metric,
    MetricDifference,
    SubjectResults,
    TunedEvaluation,
)
from workflow.lib.artifacts.manifest_record import Manifest
from workflow.lib.artifacts.parity_record import Parity
from workflow.lib.artifacts.preflight_record import Preflight
from workflow.lib.artifacts.read_records import read_record, read_steps
from workflow.lib.artifacts.records import Provenance
from workflow.lib.artifacts.training_record import Check, Step, Summary
from workflow.lib.settings.section_base import NAME_PATTERN
from workflow.lib.system.errors import UserError, setting_error


@dataclass(frozen=True)
class SamplePair:
    """One held-out prompt with both answers, the greedy ones and, where they were asked for, the
    drawn ones.
    """

    document: int
    prompt: str
    reference: str
    base: str
    tuned: str
    base_drawn: str | None
    tuned_drawn: str | None


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task, NF4 base beside tuned, and the paired difference."""

    task: str
    metric: str
    items: int
    base: Metric
    tuned: Metric
    difference: MetricDifference

    @property
    def change(self) -> str:
        """What the paired interval says of tuned against the NF4 base: `better`, `worse` or
        `without a clear change`.

        `not judged` where there is no interval, or the task does not say whether more is better.
        """
        ends, upwards = self.difference.difference_ci95, self.tuned.higher_is_better
        if ends is None or upwards is None:
            return "not judged"
        low, high = ends if upwards else (-ends[1], -ends[0])
        return "better" if low > 0 else "worse" if high < 0 else "without a clear change"


def paired_scores(base: Evaluation, tuned: TunedEvaluation) -> list[TaskScore]:
    """Return every metric of every task, in the order of the evaluation."""
    return [
        TaskScore(
            task=task,
            metric=metric,
            items=result.items,
            base=base.tasks[task].metrics[metric],
            tuned=value,
            difference=tuned.comparison.tasks[task][metric],
        )
        for task, result in tuned.tasks.items()
        for metric, value in result.metrics.items()
    ]


@dataclass(frozen=True)
class Run:
    """One run's artifacts."""

    name: str
    tokens_name: str
    manifest: Manifest
    preflight: Preflight
    summary: Summary
    steps: list[Step]
    parity: Parity
    base: Evaluation
    tuned: TunedEvaluation
    merged: MergedEvaluation | None = None
    """The merged model, where one is exported."""

    @property
    def scores(self) -> list[TaskScore]:
        """Every metric of every task, in the order of the evaluation."""
        return paired_scores(self.base, self.tuned)

    @property
    def heldout_steps(self) -> list[Step]:
        """The logged steps at which training measured the held-out loss."""
        return [step for step in self.steps if step.heldout_loss is not None]

    @property
    def samples(self) -> list[SamplePair]:
        """Both answers to each sampled prompt."""
        return [
            SamplePair(
                document=base.document,
                prompt=base.prompt,
                reference=base.reference,
                base=base.answer,
                tuned=tuned.answer,
                base_drawn=base.drawn,
                tuned_drawn=tuned.drawn,
            )
            for base, tuned in zip(self.base.samples, self.tuned.samples, strict=True)
        ]

    @property
    def has_drawn(self) -> bool:
        """Whether answers were drawn at a temperature too."""
        return any(sample.tuned_drawn is not None for sample in self.samples)

    @property
    def checks(self) -> list[Check]:
        """All that was verified: by preflight, in training, at the export."""
        return [_preflight_check(self.preflight), *self.summary.checks, _parity_check(self.parity)]

    @property
    def failed_checks(self) -> list[Check]:
        """The checks that did not pass."""
        return [check for check in self.checks if not check.passed]

    @property
    def packages(self) -> list[str]:
        """Names of all packages that some stage recorded, in alphabetical order."""
        return sorted({name for provenance in self.provenances for name in provenance.packages})

    @property
    def provenances(self) -> list[Provenance]:
        """What made each artifact, in the order of the stages."""
        return [
            self.manifest.provenance,
            self.preflight.provenance,
            self.summary.provenance,
            self.base.provenance,
            self.tuned.provenance,
        ]


def _preflight_check(preflight: Preflight) -> Check:
    return Check(
        name="Preflight: the run fits the machine",
        passed=preflight.verdict == "fits",
        detail=preflight.reason,
    )


def _parity_check(parity: Parity) -> Check:
    return Check(
        name="The exported adapter gives the logits of the trained one",
        passed=parity.passed,
        detail=(
            f"root mean square of the differences {parity.rms_difference:.3g}, tolerance "
            f"{parity.tolerance:.3g}, "
            f"of the logits {parity.rms_logit:.3g}; {parity.rows} rows, {parity.positions} "
            "positions, "
            f"{parity.compute_dtype}; same most likely token at {parity.argmax_agreement:.2%}"
        ),
    )


def read_runs(
    runs_dir: Path,
    *,
    names: list[str],
    tokens: Mapping[str, Path],
    merged: Collection[str] = (),
) -> list[Run]:
    """Read all runs, in the order of `names`; of those in `merged` the merged model's evaluation
    too.

    Raises `UserError` for a run without a tokens folder, a tokens folder without its run, a missing
    file, a missing or wrong field, and files that belong to different runs.
    """
    if wrong := [name for name in names if not re.fullmatch(NAME_PATTERN, name)]:
        raise setting_error(
            "--run", wrong, "a run's name is letters, digits, `.`, `_`, `-`", "Rename the run"
        )
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise setting_error("--run", repeated, "a run is shown once", "Name it once")
    if unknown := sorted(set(tokens) - set(names)):
        raise setting_error("--tokens", unknown, "no such --run", f"Known runs: {', '.join(names)}")
    if missing := [name for name in names if name not in tokens]:
        raise setting_error(
            "--run", missing, "has no tokens folder", "Add --tokens NAME=DIR for each of them"
        )
    return [
        read_run(runs_dir / name, tokens_dir=tokens[name], merged=name in merged) for name in names
    ]


def read_run(folder: Path, *, tokens_dir: Path, merged: bool = False) -> Run:
    """Read the artifacts of the run in `folder` (`results/runs/<run>`); raises `UserError` as
    `read_runs`.
    """
    run = Run(
        name=folder.name,
        tokens_name=tokens_dir.name,
        manifest=read_record(tokens_dir / "manifest.json", Manifest),
        preflight=read_record(folder / "preflight_run" / "preflight.json", Preflight),
        summary=read_record(folder / "finetune" / "summary.json", Summary),
        steps=read_steps(folder / "finetune" / "metrics.jsonl"),
        parity=read_record(folder / "consolidate" / "parity.json", Parity),
        base=read_record(folder / "evaluate_run" / "base.json", Evaluation),
        tuned=read_record(folder / "evaluate_run" / "tuned.json", TunedEvaluation),
        merged=(
            read_record(folder / "evaluate_run" / "merged.json", MergedEvaluation)
            if merged
            else None
        ),
    )
    _check_belongs(run, folder=folder, tokens_dir=tokens_dir)
    _check_pairs(run, folder=folder)
    return run


def _check_belongs(run: Run, *, folder: Path, tokens_dir: Path) -> None:
    """Raise `UserError` if a file is another run's or another stage's."""
    base, tuned = folder / "evaluate_run" / "base.json", folder / "evaluate_run" / "tuned.json"
    summary = folder / "finetune" / "summary.json"
    _same(summary, "run", run.summary.run, "its folder", run.name)
    _same(base, "run", run.base.run, "its folder", run.name)
    _same(tuned, "run", run.tuned.run, "its folder", run.name)
    _same(base, "subject", run.base.subject, "its file name", "base")
    _same(tuned, "subject", run.tuned.subject, "its file name", "tuned")
    manifest = f"{tokens_dir / 'manifest.json'}"
    _same(summary, "seq_len", run.summary.seq_len, manifest, run.manifest.seq_len)
    metrics = folder / "finetune" / "metrics.jsonl"
    if run.steps[-1].step > run.summary.num_steps:
        raise _mismatch(
            metrics, "step", run.steps[-1].step, f"{summary} num_steps", run.summary.num_steps
        )


def _check_pairs(run: Run, *, folder: Path) -> None:
    """Raise `UserError` if base and tuned did not answer the same questions."""
    base, tuned = folder / "evaluate_run" / "base.json", folder / "evaluate_run" / "tuned.json"
    _same(
        tuned,
        "samples.document",
        [s.document for s in run.tuned.samples],
        str(base),
        [s.document for s in run.base.samples],
    )
    _same(tuned, "tasks", _metric_names(run.tuned), str(base), _metric_names(run.base))
    compared = {task: sorted(metrics) for task, metrics in run.tuned.comparison.tasks.items()}
    _same(tuned, "comparison.tasks", compared, "tasks", _metric_names(run.tuned))
    _same(tuned, "heldout.documents", _documents(run.tuned), str(base), _documents(run.base))


def _metric_names(evaluation: SubjectResults) -> dict[str, list[str]]:
    return {task: sorted(result.metrics) for task, result in evaluation.tasks.items()}


def _documents(evaluation: SubjectResults) -> int | None:
    return None if evaluation.heldout is None else evaluation.heldout.documents


def _same(path: Path, field: str, value: object, other: str, expected: object) -> None:
    if value != expected:
        raise _mismatch(path, field, value, other, expected)


def _mismatch(path: Path, field: str, value: object, other: str, expected: object) -> UserError:
    return UserError(
        f"{path}: {field} = {value!r} does not agree with {other} = {expected!r}. "
        "The files are of different runs; run the stage that writes them again."
    )
