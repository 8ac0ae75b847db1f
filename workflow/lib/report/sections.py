"""The sections of the report, in order. Another one is a row here and a template of its key."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workflow.lib.report.comparison import (
    best_run,
    comparable,
    result_columns,
    setting_columns,
    task_columns,
)
from workflow.lib.report.figures import Figure, curve_figures, heldout_figure, memory_figure
from workflow.lib.report.length_figure import length_figure
from workflow.lib.report.required_gains import gate
from workflow.lib.report.run_results import Run
from workflow.lib.settings.config import EvaluateConfig, ReportConfig

COMMAND = "snakemake --cores all --replace-workflow-config --configfile settings.json"


@dataclass(frozen=True)
class Content:
    """What a report is made of. `settings`: by run, those that differ from the defaults."""

    runs: list[Run]
    report: ReportConfig
    settings: Mapping[str, Any]

    def evaluation_settings(self, run: Run) -> EvaluateConfig:
        return EvaluateConfig.model_validate(self.settings.get(run.name, {}).get("evaluate", {}))


@dataclass(frozen=True)
class Section:
    """A section: anchor and template, heading, whether it is shown, its template's variables."""

    key: str
    title: str
    variables: Callable[[Content], dict[str, Any]] = lambda content: {}
    shown: Callable[[list[Run]], bool] = lambda runs: True

    @property
    def template(self) -> str:
        return f"{self.key}.html.j2"


def _verdict(content: Content) -> dict[str, Any]:
    runs, best = content.runs, best_run(content.runs)
    gates = {run.name: gate(content.evaluation_settings(run), run.measured) for run in runs}
    return {
        "others": [run for run in runs if run is not best],
        "heldout": heldout_figure(runs),
        "gates": gates,
        "doubtful": [
            run
            for run in runs
            if run.measured.outcome != "improved" or run.failed_checks or not gates[run.name].passed
        ],
    }


def _comparison(content: Content) -> dict[str, Any]:
    runs = content.runs
    return {
        "settings": setting_columns(runs),
        "results": result_columns(runs),
        "task_columns": task_columns(runs),
        "same_heldout": comparable(runs),
    }


def _samples(content: Content) -> dict[str, Any]:
    asked = {run.name: content.evaluation_settings(run) for run in content.runs}
    return {"temperatures": {name: found.sample_temperature for name, found in asked.items()}}


def _datasets(content: Content) -> dict[str, list[tuple[Run, list[str], Figure | None]]]:
    """One run per tokens folder, with the names of all runs that used it, and its lengths drawn."""
    names: dict[str, list[str]] = {}
    for run in content.runs:
        names.setdefault(run.tokens_name, []).append(run.name)
    firsts = {run.tokens_name: run for run in reversed(content.runs)}
    return {
        "datasets": [
            (firsts[tokens], users, length_figure(firsts[tokens].manifest, number=number))
            for number, (tokens, users) in enumerate(names.items(), 1)
        ]
    }


def _provenance(content: Content) -> dict[str, Any]:
    commits = {origin.commit for run in content.runs for origin in run.provenances}
    report = content.report.model_dump(mode="json", exclude_defaults=True)
    return {
        "command": COMMAND,
        "commit": commits.pop() if len(commits) == 1 else None,  # of every artifact
        "document": json.dumps({"report": report, "runs": content.settings}, indent=2),
    }


SECTIONS = (
    Section("verdict", "Verdict", _verdict),
    Section("comparison", "Comparison", _comparison, shown=lambda runs: len(runs) > 1),
    Section("training", "Training", lambda content: {"curves": curve_figures(content.runs)}),
    Section("tasks", "Tasks"),
    Section("samples", "Samples", _samples),
    Section("gguf", "GGUF files", shown=lambda runs: any(run.gguf for run in runs)),
    Section("memory", "Memory and time", lambda content: {"memory": memory_figure(content.runs)}),
    Section("data", "Data", _datasets),
    Section("checks", "Checks"),
    Section("provenance", "Provenance", _provenance),
)
