"""The report as one HTML file that needs no network: text, tables, style, figures and Plotly.
Another section is a row of `SECTIONS` and a template of its key.

All text from the artifacts is untrusted: Jinja escapes it, `visible` shows control characters,
figure data is a JSON island with `<` escaped, and the content security policy allows two scripts by
SHA-256 and no request."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from workflow import VERSION
from workflow.lib.artifacts.records import Interval
from workflow.lib.artifacts.training_record import Step
from workflow.lib.evaluation.intervals import FEWEST
from workflow.lib.planning.preflight.forecast import nearest_plans, plan_choices
from workflow.lib.report.comparison import (
    behind_best,
    best_run,
    comparable,
    flat,
    pairs_of,
    ranking,
    result_columns,
    setting_columns,
    task_columns,
)
from workflow.lib.report.figures import (
    GROUP_CURVES,
    GROUP_NUMBERS,
    Curve,
    Figure,
    curve_figures,
    drawn,
    heldout_figure,
    memory_figure,
    sampled_figure,
)
from workflow.lib.report.run_results import Run
from workflow.lib.report.verdict import Measured, gate, label
from workflow.lib.settings.config import EvaluateConfig, ReportConfig
from workflow.lib.settings.forms import FORMS, SUBJECTS
from workflow.lib.settings.objectives import needs_of
from workflow.lib.step_plan.memory_options import in_words
from workflow.lib.system import number_formats
from workflow.lib.system.files import provenance

COMMAND = "snakemake --cores all --configfile settings.json"


@dataclass(frozen=True)
class Content:
    """The inputs of a report. settings: by run, the settings that differ from the defaults."""

    runs: list[Run]
    report: ReportConfig
    settings: Mapping[str, Any]

    def evaluation_settings(self, run: Run) -> EvaluateConfig:
        settings = self.settings.get(run.name, {}).get("evaluate", {})
        return EvaluateConfig.model_validate(settings).judged(last_round=run.last_round)


@dataclass(frozen=True)
class Section:
    """A section: anchor and template, heading, whether it is shown, its template's variables."""

    key: str
    title: str
    variables: Callable[[Content], dict[str, Any]] = lambda content: {}
    shown: Callable[[Content], bool] = lambda content: True

    @property
    def template(self) -> str:
        return f"{self.key}.html.j2"


def _verdict(content: Content) -> dict[str, Any]:
    runs, best = content.runs, best_run(content.runs)
    gates = {run.name: gate(content.evaluation_settings(run), run.measured) for run in runs}
    return {
        "others": [run for run in runs if run is not best],
        "fewest": FEWEST,
        "heldout": heldout_figure(runs),
        "gates": gates,
        "doubtful": [
            run
            for run in runs
            if run.measured.outcome != "improved"
            or run.failed_checks
            or not gates[run.name].passed
            or (run.measured.forgetting is not None and run.measured.forgetting.is_worse)
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


def _preferences(content: Content) -> dict[str, Any]:
    runs = content.runs
    return {
        "preference_runs": reward_runs(runs),
        "reward_curves": reward_figures(runs),
        "reward_fields": {run.name: reward_fields(run) for run in runs},
        "falls": {run.name: fall for run in runs if (fall := both_fell(run)) is not None},
    }


def _rounds(content: Content) -> dict[str, Any]:
    runs = sampling_runs(content.runs)
    fields = [field for curve in GROUP_CURVES for field in curve.fields]
    logged = [f for f in fields if any(getattr(s, f) is not None for r in runs for s in r.steps)]
    return {
        "sampling": runs,
        "reward_means": sampled_figure(runs),
        "group_fields": logged,
        "group_means": {run.name: {f: _mean(run.steps, f) for f in logged} for run in runs},
        "group_curves": drawn(GROUP_CURVES, content.runs, numbers=GROUP_NUMBERS),
    }


def sampling_runs(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.sampled is not None]


def _datasets(content: Content) -> dict[str, list[tuple[Run, list[str]]]]:
    """One run per tokens folder, with the names of all runs that used it."""
    users: dict[str, list[Run]] = {}
    for run in content.runs:
        users.setdefault(run.tokens_name, []).append(run)
    return {"datasets": [(runs[0], [run.name for run in runs]) for runs in users.values()]}


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
    Section("comparison", "Comparison", _comparison, shown=lambda content: len(content.runs) > 1),
    Section("training", "Training", lambda content: {"curves": curve_figures(content.runs)}),
    Section(
        "preferences",
        "Preferences",
        _preferences,
        shown=lambda content: bool(reward_runs(content.runs)),
    ),
    Section("rounds", "Rounds", _rounds, shown=lambda content: bool(sampling_runs(content.runs))),
    Section("tasks", "Tasks"),
    Section("samples", "Samples"),
    Section("gguf", "GGUF files", shown=lambda content: any(run.gguf for run in content.runs)),
    Section("memory", "Memory and time", lambda content: {"memory": memory_figure(content.runs)}),
    Section("data", "Data", _datasets),
    Section("checks", "Checks"),
    Section("provenance", "Provenance", _provenance),
)


TEMPLATES = Path(__file__).resolve().parents[2] / "report"
CURVE_TABLE_ROWS = 12  # steps listed under the curves: a phone's screen of the same numbers

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
    """Return the page of `runs` (at least one) as HTML. settings: by run, the settings that differ
    from the defaults; the page has commands with them that reproduce everything."""
    assert runs, "a report shows at least one run"
    content = Content(runs, report, settings)
    sections = [section for section in SECTIONS if section.shown(content)]
    variables = {
        "report": report,
        "runs": runs,
        "best": best_run(runs),
        "behind": behind_best(runs),
        "ranking": ranking(runs),
        "pairs": pairs_of(runs),
        "forms": FORMS,
        "shown_subjects": [n for n in SUBJECTS if any(n in r.measured.subjects for r in runs)],
        "rendered": provenance(),
        "version": VERSION,
        "sections": sections,
        **_style_and_scripts(),
    }
    for section in sections:
        variables |= section.variables(content)
    drawn = {each.key: {"data": each.data, "layout": each.layout} for each in _figures(variables)}
    return _environment().get_template("page.html.j2").render(variables, figures=drawn)


def _figures(value: object) -> Iterator[Figure]:
    if isinstance(value, Figure):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _figures(item)


def _style_and_scripts() -> dict[str, Any]:
    plotly, script = get_plotlyjs(), (TEMPLATES / "page.js").read_text(encoding="utf-8")
    return {
        "style": Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        "scripts": [Markup(plotly), Markup(script)],
        "script_hashes": [_csp_hash(plotly), _csp_hash(script)],
    }


def _csp_hash(script: str) -> str:
    """Return the source expression that allows exactly this inline script (CSP level 3)."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def templates(finalize: Callable[[Any], object], **options: Any) -> Environment:
    """Return an environment of the shipped templates: values are escaped, a missing one raises."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


def _environment() -> Environment:
    environment = templates(_finalize)
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
        "plan_choices": plan_choices,
        "fields": asdict,
        "in_words": in_words,
    }
    return environment


def _finalize(value: object) -> object:
    """Show control characters; own markup passes. None never reaches the page by accident."""
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
    """Write a value of unknown kind: text unchanged, whole numbers in full, others rounded."""
    if value is None:
        return Markup('<span class="none">none</span>')
    if isinstance(value, str | bool):
        return Markup("{}").format(number_formats.visible(str(value)))
    return _number(number_formats.count if isinstance(value, int) else number_formats.general)(
        value
    )


def task_pair(measured: Measured) -> tuple[str, str]:
    """Return the two subjects of task scores, before and after, with names for people."""
    return label(measured.task_reference), label(measured.served)


def selected_steps(steps: list[Step]) -> list[Step]:
    """Return up to `CURVE_TABLE_ROWS` of the steps, evenly spaced, with both ends."""
    last = len(steps) - 1
    rows = min(CURVE_TABLE_ROWS, len(steps))
    indices = sorted({round(last * row / max(1, rows - 1)) for row in range(rows)})
    return [steps[index] for index in indices]


REWARD_NUMBERS = "preferences-numbers"
# Of pairs and of rated answers: the kind that training should make likelier, and the other.
ANSWER_KINDS: dict[str, tuple[str, str]] = {
    "pairs": ("chosen", "rejected"),
    "rated": ("desirable", "undesirable"),
}


def _fields_by_kind(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{kind}" for kinds in ANSWER_KINDS.values() for kind in kinds)


REWARD_CURVES = (
    Curve(
        "rewards",
        "Rewards",
        "As the objective defines them, mean over a step. Dashed: rejected or undesirable answers.",
        "reward",
        _fields_by_kind("reward"),
    ),
    Curve(
        "log_probs",
        "Log-probabilities",
        "Of whole answers, mean over a step. Dashed: rejected or undesirable answers.",
        "nats per answer",
        _fields_by_kind("log_probs"),
    ),
    Curve(
        "reward_accuracy",
        "Reward accuracy",
        "Share of the pairs of a step whose chosen answer has the higher reward.",
        "share",
        ("reward_accuracy",),
    ),
    Curve(
        "reward_margin",
        "Reward margin",
        "Reward of the chosen answer - of the rejected one, mean over the pairs of a step.",
        "reward",
        ("reward_margin",),
    ),
    Curve(
        "kl",
        "Reference point",
        "log p - log p_ref of prompts with answers of other rows, mean over a step.",
        "nats per answer",
        ("kl",),
    ),
)


def reward_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs whose training or evaluation has rewards."""
    return [run for run in runs if reward_fields(run) or run.measured.served.rewards]


def reward_fields(run: Run) -> list[str]:
    """Return the fields of rewards and log-probabilities that a run logged."""
    fields = [field for curve in REWARD_CURVES for field in curve.fields]
    return [name for name in fields if any(getattr(s, name) is not None for s in run.steps)]


def reward_figures(runs: list[Run]) -> list[Figure]:
    return drawn(REWARD_CURVES, runs, numbers=REWARD_NUMBERS)


@dataclass(frozen=True)
class Fall:
    """Decrease in likelihood of chosen and rejected answers, if both decreased."""

    kinds: tuple[str, str]
    chosen: float
    rejected: float
    unit: str
    since: str


def both_fell(run: Run) -> Fall | None:
    """Return the decrease of both kinds of answers in training, or None. With a reference model it
    is in the rewards of the last tenth of the steps, which compare the same answers; without one in
    their log-probabilities against the first tenth's."""
    needs = needs_of(run.summary.settings.train.get("objective", "sft"))
    if needs.examples not in ANSWER_KINDS or len(run.steps) < 2:
        return None
    kinds, tenth = ANSWER_KINDS[needs.examples], max(1, len(run.steps) // 10)
    if needs.scores_of:
        chosen, rejected = (_mean(run.steps[-tenth:], f"reward_{kind}") for kind in kinds)
        fall = Fall(kinds, chosen, rejected, "reward", "against the reference")
    else:
        chosen, rejected = (
            _mean(run.steps[-tenth:], field) - _mean(run.steps[:tenth], field)
            for field in (f"log_probs_{kind}" for kind in kinds)
        )
        fall = Fall(kinds, chosen, rejected, "nats per answer", "since the first steps")
    return fall if max(chosen, rejected) < 0 else None


def _mean(steps: list[Step], field: str) -> float:
    """Return the mean of a field; 0 if no step has it."""
    values = [value for step in steps if (value := getattr(step, field)) is not None]
    return fmean(values or [0.0])
