"""The interactive figures, as plain Plotly JSON (`data` and `layout`), without colours.

The page's script colours them from its style sheet's variables, so that figures follow light, dark
and print: a trace's `meta` names the variable, `series-1` for `--series-1`. Text from the artifacts
is escaped for Plotly, which reads a subset of HTML in names and hover labels."""

import html
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from workflow.lib.artifacts.records import Interval
from workflow.lib.artifacts.training_record import Step
from workflow.lib.report.run_results import Run
from workflow.lib.settings.forms import FORMS, SUBJECTS, SubjectName
from workflow.lib.system.number_formats import binary_unit, size, thinned, visible

NUM_COLORS = 8  # --series-1 to --series-8 in style.css
POINTS_PER_CURVE = 2000  # more than the columns of a screen; keeps the page of a long run small
DASHES = ("solid", "dash", "dot", "dashdot")
PATTERNS = ("", "/", "\\", "-")  # of `.hatch-<number>` in style.css too

LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}

CURVE_NUMBERS = "training-numbers"


@dataclass(frozen=True)
class Figure:
    """One figure: its place, a description, and Plotly's `data` and `layout`."""

    key: str
    title: str
    caption: str
    numbers: str  # `id` of the page's table with the drawn numbers
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    legend: tuple["Key", ...] = ()
    """Keys listed below the figure, where Plotly's own legend is too wide for a phone."""


@dataclass(frozen=True)
class Key:
    """An entry of a legend: text, the colour's variable, and number of its pattern (`PATTERNS`)."""

    text: str
    color: str
    pattern: int


@dataclass(frozen=True)
class Curve:
    """A figure of fields over the steps; some steps may have none. number: format of a value;
    marked: whether its points are shown."""

    key: str
    title: str
    caption: str
    axis: str
    fields: tuple[str, ...]
    number: str = ".4g"
    from_zero: bool = False
    marked: bool = False


CURVES = (
    Curve(
        "loss",
        "Training loss",
        "Mean over the trained tokens of a step, nats per token; of pairs and rated answers, the "
        "objective's loss, mean over these.",
        "nats",
        ("loss",),
        ".4f",
    ),
    Curve(
        "heldout_loss",
        "Held-out loss while training",
        "Mean loss per trained token on held-out documents, nats, as the training measured it; of "
        "pairs and rated answers, the objective's loss.",
        "nats",
        ("heldout_loss",),
        ".4f",
        marked=True,
    ),
    Curve(
        "grad_norm",
        "Gradient norm",
        "Global norm before clipping. A flat zero would mean that nothing is trained.",
        "gradient norm",
        ("grad_norm",),
    ),
    Curve(
        "learning_rate",
        "Learning rate",
        "After warm-up and decay.",
        "learning rate",
        ("learning_rate",),
        ".3g",
    ),
    Curve(
        "tokens_per_s",
        "Throughput",
        "Tokens per second, all processes together.",
        "tokens/s",
        ("tokens_per_s",),
        ",.0f",
        from_zero=True,
    ),
)
GROUP_CURVES = (
    Curve(
        "clipped",
        "Clipped",
        "Share of a step's trained tokens whose ratio to the start of the round is clipped.",
        "share",
        ("clipped",),
    ),
    Curve(
        "reference_kl",
        "KL to the reference",
        "Estimated from the trained tokens of a step.",
        "nats per token",
        ("reference_kl",),
    ),
    Curve(
        "entropy",
        "Entropy",
        "Mean -log p of the trained tokens of a step, which were sampled.",
        "nats per token",
        ("entropy",),
    ),
)
GROUP_NUMBERS = "rounds-numbers"
# Last words of fields of the worse answers: of pairs and of rated answers.
DASHED = {"rejected", "undesirable"}


def curve_figures(runs: list[Run]) -> list[Figure]:
    return [*drawn(CURVES, runs, numbers=CURVE_NUMBERS), _memory_curve(runs)]


def drawn(curves: Iterable[Curve], runs: list[Run], *, numbers: str) -> list[Figure]:
    """Return the figures of curves with values in any run. numbers: `id` of their table."""
    figures = []
    for curve in curves:
        if lines := [line for n, run in enumerate(runs) for line in _lines(curve, run, n)]:
            layout = over_steps(len(lines), axis=curve.axis, from_zero=curve.from_zero)
            figures.append(Figure(curve.key, curve.title, curve.caption, numbers, lines, layout))
    return figures


def _lines(curve: Curve, run: Run, index: int) -> Iterator[dict[str, Any]]:
    for field in curve.fields:
        logged = [
            (step, value) for step in run.steps if (value := getattr(step, field)) is not None
        ]
        if not logged:
            continue
        steps, values = map(list, zip(*logged, strict=True))
        line = line_of(run, index, values, curve.number, steps=steps)
        if curve.marked:
            line["mode"] = "lines+markers"
        if len(curve.fields) > 1:
            kind = field.rpartition("_")[2]
            dash = {"width": 1.8, "dash": "dash" if kind in DASHED else "solid"}
            line |= {"name": f"{line['name']}, {kind}", "line": dash}
        yield line


def _memory_curve(runs: list[Run]) -> Figure:
    """Return memory in the binary unit of the highest peak: 21.3 and not 22871015424."""
    unit, name = binary_unit(max(step.peak_bytes for run in runs for step in run.steps))
    traces = [
        line_of(run, index, [step.peak_bytes / unit for step in run.steps], ".3f")
        for index, run in enumerate(runs)
    ]
    caption = f"Peak so far of the process that logs, {name}."
    layout = over_steps(len(runs), axis=name, from_zero=True)
    return Figure("peak_bytes", "Peak memory", caption, CURVE_NUMBERS, traces, layout)


def line_of(
    run: Run, index: int, values: list[float], number: str, *, steps: list[Step] | None = None
) -> dict[str, Any]:
    """Return a run's line of `values` at `steps` (default: all logged), coloured by `index`."""
    steps = run.steps if steps is None else steps
    positions = thinned(values, limit=POINTS_PER_CURVE)
    return {
        "type": "scatter",
        "mode": "lines" if len(positions) > 1 else "markers",
        "name": plotly_text(run.name),
        "meta": f"series-{index % NUM_COLORS + 1}",
        "x": [steps[position].step for position in positions],
        "y": [values[position] for position in positions],
        "line": {"width": 1.8, "dash": DASHES[index // NUM_COLORS % len(DASHES)]},
        "hovertemplate": f"%{{y:{number}}}",
    }


def over_steps(lines: int, *, axis: str, from_zero: bool = False) -> dict[str, Any]:
    """Return the layout of a curve. axis: title of the y axis. from_zero: the y axis begins at
    0."""
    return {
        "height": 300,
        "margin": {"l": 12, "r": 12, "t": 10, "b": 44},
        "hovermode": "x unified",
        "showlegend": lines > 1,
        "legend": LEGEND,
        "xaxis": {"title": {"text": "optimizer step"}},
        "yaxis": {
            "title": {"text": axis},
            "automargin": True,
            "exponentformat": "power",
            "separatethousands": True,
            "minexponent": 6,
            "rangemode": "tozero" if from_zero else "normal",
        },
    }


def sampled_figure(runs: list[Run]) -> Figure | None:
    """Return mean rewards of sampled answers with 95% intervals, by run; None for a single run."""
    if len(runs) < 2:
        return None
    traces = []
    for number, (name, of) in enumerate(
        {"training": "trained", "held-out before": "heldout", "held-out after": "after"}.items()
    ):
        every_mean = {plotly_text(run.name): getattr(run.sampled, of) for run in runs}
        means = {name: mean for name, mean in every_mean.items() if mean is not None}
        values = [mean.value for mean in means.values()]
        ends = [mean.ci95 or (mean.value, mean.value) for mean in means.values()]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "meta": f"series-{number + 1}",
                "x": [*means],
                "y": values,
                "error_y": _error_bars(values, ends),
                "hovertemplate": "%{y:.3f}",
            }
        )
    layout = over_steps(len(traces), axis="reward")
    layout["xaxis"] = {"title": {"text": "run"}, "type": "category"}
    caption = "Mean over prompts of the rewards of sampled answers; bars are 95% intervals."
    return Figure("sampled", "Rewards", caption, GROUP_NUMBERS, traces, layout)


def heldout_figure(runs: list[Run]) -> Figure | None:
    """Return held-out loss of all subjects with 95% intervals, a row per run; None without any."""
    measured = [run for run in runs if run.measured.served.heldout]
    if not measured:
        return None
    shown = [name for name in SUBJECTS if any(name in run.measured.subjects for run in measured)]
    what = " or ".join(sorted({r.measured.served.heldout.of for r in measured}))  # type: ignore[union-attr]
    return Figure(
        "heldout",
        "Held-out loss: " + ", ".join(FORMS[name].label for name in shown),
        f"Mean loss per trained token on the held-out {what}, nats; bars are 95% "
        "intervals. Lower is better.",
        "comparison-numbers" if len(runs) > 1 else "verdict",
        [_interval_points(measured, name) for name in shown],
        _over_runs(measured, "nats per token", around=150, least=34) | {"legend": LEGEND},
    )


def _over_runs(runs: list[Run], axis: str, *, around: int, least: int) -> dict[str, Any]:
    """Return the layout of a figure with a row per run, the first on top, with room for every line
    of the longest name. axis: title of the x axis. around, least: pixels beside rows and of one."""
    row = max(least, *(18 * (1 + plotly_text(run.name).count("<br>")) for run in runs))
    return {
        "height": around + len(runs) * row,
        "margin": {"l": 12, "r": 16, "t": 10, "b": 44},
        "hovermode": "closest",
        "xaxis": {"title": {"text": axis}},
        "yaxis": {"automargin": True, "type": "category", "range": [len(runs) - 0.5, -0.5]},
    }


def _interval_points(runs: list[Run], subject: SubjectName) -> dict[str, Any]:
    measured = [run for run in runs if subject in run.measured.subjects]
    results = [run.measured.subjects[subject].heldout for run in measured]
    heldouts = [heldout for heldout in results if heldout is not None]
    losses = [heldout.loss for heldout in heldouts]
    intervals = [heldout.loss_ci95 for heldout in heldouts]
    form = FORMS[subject]
    assert form.mark is not None, "a measured form has a mark"
    color, symbol = form.mark
    return {
        "type": "scatter",
        "mode": "markers",
        "name": form.label,
        "meta": color,
        "x": losses,
        "y": [plotly_text(run.name) for run in measured],
        "marker": {"size": 11, "symbol": symbol, "line": {"width": 2}},
        "error_x": _error_bars(losses, intervals) | {"thickness": 2, "width": 6},
        "customdata": [list(interval) for interval in intervals],
        "hovertemplate": "%{x:.4f} [%{customdata[0]:.4f}, %{customdata[1]:.4f}]",
    }


def _error_bars(values: list[float], intervals: list[Interval]) -> dict[str, Any]:
    ends = list(zip(values, intervals, strict=True))
    above, below = [high - x for x, (_, high) in ends], [x - low for x, (low, _) in ends]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below}


def memory_figure(runs: list[Run]) -> Figure:
    """Return each run's predicted peak, stacked by terms, with measured peak and capacity."""
    measured = [run.summary.peak_bytes.measured for run in runs]
    capacity = [run.preflight.capacity_bytes for run in runs]
    predicted = [run.preflight.peak_bytes for run in runs]
    unit, name = binary_unit(max(*measured, *capacity, *predicted))
    largest_first = sorted(
        (term for run in runs for term in run.preflight.terms), key=lambda term: -term.bytes
    )
    terms = dict.fromkeys(term.name for term in largest_first)
    stack = [_term(runs, term, index, unit) for index, term in enumerate(terms)]
    return Figure(
        "memory",
        "Predicted and measured peak memory per process",
        f"Stacked: the terms of the predicted peak, {name}. Diamond: the measured peak. Upright "
        "line: the capacity.",
        "memory-numbers",
        [
            *stack,
            _mark(runs, "measured peak", measured, unit, symbol="diamond"),
            _mark(runs, "capacity", capacity, unit, symbol="line-ns-open"),
        ],
        _over_runs(runs, name, around=110, least=48)
        | {"barmode": "stack", "showlegend": False}
        | {"xaxis": {"title": {"text": name}, "rangemode": "tozero"}},
        tuple(Key(term, *_paint(index)) for index, term in enumerate(terms)),
    )


def _paint(index: int) -> tuple[str, int]:
    """Return colour and pattern of the term at `index`: plain colours first, then hatched."""
    return f"series-{index % NUM_COLORS + 1}", index // NUM_COLORS % len(PATTERNS)


def _term(runs: list[Run], term: str, index: int, unit: int) -> dict[str, Any]:
    amounts = [
        sum(addend.bytes for addend in run.preflight.terms if addend.name == term) for run in runs
    ]
    color, pattern = _paint(index)
    return {
        "type": "bar",
        "orientation": "h",
        "name": plotly_text(term),
        "meta": color,
        "x": [amount / unit for amount in amounts],
        "y": [plotly_text(run.name) for run in runs],
        "width": 0.5,
        "marker": {"pattern": {"shape": PATTERNS[pattern]}},
        "customdata": [size(amount) for amount in amounts],
        "hovertemplate": "%{customdata}",
    }


def _mark(
    runs: list[Run], name: str, amounts: list[int], unit: int, *, symbol: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "meta": "ink",
        "x": [amount / unit for amount in amounts],
        "y": [plotly_text(run.name) for run in runs],
        "marker": {
            "size": 13 if symbol == "diamond" else 30,
            "symbol": symbol,
            "line": {"width": 2},
        },
        "customdata": [size(amount) for amount in amounts],
        "hovertemplate": "%{customdata}",
    }


def plotly_text(text: str) -> str:
    """Escape text for Plotly, which would read `<b>` as markup, in lines that fit a phone."""
    lines = textwrap.wrap(visible(text), width=24)
    return "<br>".join(html.escape(line, quote=False) for line in lines)
