"""The report as one HTML file that needs no network: text, tables, style, figures and Plotly
itself.

All text from the artifacts is untrusted. Jinja escapes it (autoescape), `visible` shows characters
that would act, figure data sits in a JSON island with `<` escaped, and the page's content security
policy allows two scripts by their SHA-256 and no request at all: text that slipped through could
not run.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from workflow.lib.artifacts.records import Interval
from workflow.lib.artifacts.training_record import Step
from workflow.lib.planning.preflight.plan_words import choices, in_words, nearest_plans
from workflow.lib.report.comparison import (
    best_run,
    comparable,
    flat,
    result_columns,
    setting_columns,
    task_columns,
)
from workflow.lib.report.figures import Figure, curve_figures, heldout_figure, memory_figure
from workflow.lib.report.length_figure import length_figure
from workflow.lib.report.parallel_coordinates import parallel_figure
from workflow.lib.report.required_gains import gate
from workflow.lib.report.run_results import Run
from workflow.lib.report.verdict import Measured, label
from workflow.lib.settings.config import EvaluateConfig, ReportConfig
from workflow.lib.settings.subjects import SUBJECT_LABELS, SUBJECT_MEANINGS, SUBJECTS
from workflow.lib.system import number_formats
from workflow.lib.system.files import provenance

TEMPLATES = Path(__file__).resolve().parents[2] / "report"
CURVE_TABLE_ROWS = 12  # steps listed under the curves: a phone's screen of the same numbers
COMMAND = "snakemake --cores all --replace-workflow-config --configfile settings.json"

NUMBERS: dict[str, Callable[[float], str]] = {
    "loss": number_formats.loss,
    "signed": number_formats.signed,
    "general": number_formats.general,
    "count": number_formats.count,
    "share": number_formats.share,
    "hours": number_formats.hours,
    "probability": number_formats.probability,
    "size": number_formats.size,
    "duration": number_formats.duration,
}


def render_page(runs: list[Run], *, report: ReportConfig, settings: Mapping[str, Any]) -> str:
    """Return the page of `runs` (at least one) as HTML.

    settings: by run, those that differ from the defaults: with them the page says how to make all
    of it again.
    """
    assert runs, "a report shows at least one run"
    variables = {
        "report": report,
        "runs": runs,
        "with_gguf": [run for run in runs if run.gguf],
        "subject_labels": SUBJECT_LABELS,
        "subject_meanings": SUBJECT_MEANINGS,
        "shown_subjects": [n for n in SUBJECTS if any(n in r.measured.subjects for r in runs)],
        **_tables(runs),
        **_verdicts(runs, settings),
        **_figures(runs),
        **_origin(runs, report, settings),
        **_style_and_scripts(),
    }
    return _environment().get_template("page.html.j2").render(variables)


def _tables(runs: list[Run]) -> dict[str, Any]:
    """Return the template's variables of the runs side by side."""
    best = best_run(runs)
    return {
        "settings": setting_columns(runs),
        "results": result_columns(runs),
        "task_columns": task_columns(runs),
        "same_heldout": comparable(runs),
        "best": best,
        "others": [run for run in runs if run is not best],
    }


def _verdicts(runs: list[Run], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables of what each run was asked and what it reached."""
    asked = {run.name: _evaluation_settings(settings, run) for run in runs}
    gates = {run.name: gate(asked[run.name], run.measured) for run in runs}
    return {
        "gates": gates,
        "doubtful": [
            run
            for run in runs
            if run.measured.outcome != "improved" or run.failed_checks or not gates[run.name].passed
        ],
        "temperatures": {name: of_run.sample_temperature for name, of_run in asked.items()},
    }


def _figures(runs: list[Run]) -> dict[str, Any]:
    """Return the template's variables of the figures, and their data by key."""
    curves, memory = curve_figures(runs), memory_figure(runs)
    heldout, parallel = heldout_figure(runs), parallel_figure(runs)
    datasets = _datasets(runs)
    figures = [*curves, memory, heldout, parallel, *(lengths for *_, lengths in datasets)]
    return {
        "datasets": datasets,
        "curves": curves,
        "memory": memory,
        "heldout": heldout,
        "parallel": parallel,
        "figures": {
            figure.key: {"data": figure.data, "layout": figure.layout}
            for figure in figures
            if figure
        },
    }


def _origin(runs: list[Run], report: ReportConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables of what made the page, and how to make all of it again."""
    document = {"report": report.model_dump(mode="json", exclude_defaults=True), "runs": settings}
    return {
        "rendered": provenance(),
        "command": COMMAND,
        "commit": _one_commit(runs),
        "document": json.dumps(document, indent=2),
    }


def _style_and_scripts() -> dict[str, Any]:
    """Return the template's variables of what stands in the page itself."""
    plotly, script = get_plotlyjs(), (TEMPLATES / "page.js").read_text(encoding="utf-8")
    return {
        "style": Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        "scripts": [Markup(plotly), Markup(script)],
        "script_hashes": [_csp_hash(plotly), _csp_hash(script)],
    }


def _evaluation_settings(settings: Mapping[str, Any], run: Run) -> EvaluateConfig:
    return EvaluateConfig.model_validate(settings.get(run.name, {}).get("evaluate", {}))


def _datasets(runs: list[Run]) -> list[tuple[Run, list[str], Figure | None]]:
    """Return one run per tokens folder, with the names of all runs that used it, and its lengths
    drawn.
    """
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(run.tokens_name, []).append(run.name)
    firsts = {run.tokens_name: run for run in reversed(runs)}
    return [
        (firsts[tokens], users, length_figure(firsts[tokens].manifest, number=number))
        for number, (tokens, users) in enumerate(names.items(), 1)
    ]


def _one_commit(runs: list[Run]) -> str | None:
    """Return the commit that made every artifact; None if there was more than one, or none."""
    commits = {origin.commit for run in runs for origin in run.provenances}
    return commits.pop() if len(commits) == 1 else None


def _csp_hash(script: str) -> str:
    """Return the source expression that lets exactly this inline script run (CSP level 3)."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: _number(style) for name, style in NUMBERS.items()}
    environment.filters |= {
        "interval": interval,
        "spoken": number_formats.spoken,
        "cell": cell,
        "flat": flat,
        "label": label,
        "task_pair": task_pair,
        "selected_steps": selected_steps,
        "nearest_plans": nearest_plans,
        "plan_choices": choices,
        "in_words": in_words,
    }
    return environment


def _finalize(value: object) -> object:
    """Show what would act; markup made here passes. None never reaches the page by accident."""
    assert value is not None, "the template prints a value that is not there"
    return value if isinstance(value, Markup) else number_formats.visible(str(value))


def _number(style: Callable[[float], str]) -> Callable[[float | None], Markup]:
    """Return a filter that writes a number for people and, in `value`, for programs."""

    def write(value: float | None) -> Markup:
        if value is None:
            return Markup('<span class="none">not measured</span>')
        return Markup('<data value="{}">{}</data>').format(repr(value), style(value))

    return write


def interval(value: Interval | None, style: str) -> Markup:
    """Write `[low, high]`; nothing if there is no interval."""
    if value is None:
        return Markup("")
    low, high = (_number(NUMBERS[style])(end) for end in value)
    return Markup('<span class="interval">[{}, {}]</span>').format(low, high)


def cell(value: str | float | bool | None) -> Markup:
    """Write a value of unknown kind: text as it is, whole numbers in full, others to four
    digits.
    """
    if value is None:
        return Markup('<span class="none">none</span>')
    if isinstance(value, str | bool):
        return Markup("{}").format(number_formats.visible(str(value)))
    return _number(number_formats.count if isinstance(value, int) else number_formats.general)(
        value
    )


def task_pair(measured: Measured) -> tuple[str, str]:
    """Return what the scores of tasks are of, before and after, as people read it."""
    return label(measured.task_reference), label(measured.served)


def selected_steps(steps: list[Step]) -> list[Step]:
    """Return up to `CURVE_TABLE_ROWS` of the steps, evenly spaced, the first and the last among
    them.
    """
    last = len(steps) - 1
    rows = min(CURVE_TABLE_ROWS, len(steps))
    indices = sorted({round(last * row / max(1, rows - 1)) for row in range(rows)})
    return [steps[index] for index in indices]
