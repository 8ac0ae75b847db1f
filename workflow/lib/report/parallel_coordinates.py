"""A sweep as parallel coordinates: an upright axis per setting that differs, the last one the
held-out loss.

Drawn as ordinary Plotly lines, not as its `parcoords`: that needs WebGL and code built from text,
which the page's content security policy forbids, and it cannot be printed as vectors. A line is
coloured by its loss.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from workflow.lib.report.comparison import Column, Value, comparable, setting_columns
from workflow.lib.report.figures import Figure, plotly_text
from workflow.lib.report.run_results import Run
from workflow.lib.system.number_formats import general, loss, spoken

MAX_AXES = 6  # settings beside the loss: more cannot be read on a phone
MAX_TICKS = 7
NUM_TONES = 5  # --tone-1 (lowest loss) to --tone-5 in style.css
LOG_RATIO = 10  # a setting that spans this factor is drawn on a logarithmic axis
MODEL_NAMES = ("data", "seq_len")  # settings proper beside those with a section in their name


@dataclass(frozen=True)
class Axis:
    """One upright axis. `positions`: height of each run, 0 to 1; `labels`: its value as text."""

    title: str
    positions: tuple[float, ...]
    labels: tuple[str, ...]


def parallel_figure(runs: list[Run]) -> Figure | None:
    """Return the figure; None unless two runs or more were measured on the same documents with
    other settings.
    """
    measured = [run for run in runs if run.measured.served.heldout]
    if len(measured) < 2 or not comparable(measured):
        return None
    columns, followers = _independent(
        [column for column in setting_columns(measured) if column.differs and _is_setting(column)]
    )
    if not columns:
        return None
    served = [run.measured.served.heldout for run in measured]
    losses = [heldout.loss for heldout in served if heldout]
    axes = [*(_axis(column) for column in columns[:MAX_AXES]), _loss_axis(losses)]
    return Figure(
        "parallel",
        "Settings and held-out loss",
        _caption(columns, followers),
        "comparison-numbers",
        [_line(run, index, axes, losses) for index, run in enumerate(measured)],
        _layout(axes),
    )


def _is_setting(column: Column) -> bool:
    return "." in column.name or column.name in MODEL_NAMES


def _independent(columns: list[Column]) -> tuple[list[Column], dict[str, list[str]]]:
    """Return the columns that tell runs apart anew, and for each the names of those that change
    together with it.
    """
    independent: dict[tuple[int, ...], Column] = {}
    followers: dict[str, list[str]] = {}
    for column in columns:
        first = {repr(value): column.values.index(value) for value in reversed(column.values)}
        groups = tuple(first[repr(value)] for value in column.values)
        if groups in independent:
            followers.setdefault(independent[groups].name, []).append(column.name)
        else:
            independent[groups] = column
    return list(independent.values()), followers


def _caption(columns: list[Column], followers: dict[str, list[str]]) -> str:
    together = [
        f" {' and '.join(names)} changed together with {name}." for name, names in followers.items()
    ]
    hidden = [column.name for column in columns[MAX_AXES:]]
    return (
        "A line per run, from its settings to its held-out loss (nats per token, lower is better); "
        "the darker in light mode, or the brighter in dark mode, the lower the loss."
        + "".join(together)
        + (f" Not drawn: {', '.join(hidden)}." if hidden else "")
    )


def _axis(column: Column) -> Axis:
    numbers = [v for v in column.values if isinstance(v, int | float) and not isinstance(v, bool)]
    title = spoken(column.name.removeprefix("train.").removeprefix("data."))
    if len(numbers) < len(column.values):
        return _categories(title, column.values)
    if min(numbers) > 0 and max(numbers) >= LOG_RATIO * min(numbers):
        heights = _scaled([log(number) for number in numbers])
    else:
        heights = _scaled(numbers)
    return Axis(title, heights, tuple(general(number) for number in numbers))


def _categories(title: str, values: Sequence[Value]) -> Axis:
    """Space words evenly, in the order of the runs."""
    words = ["none" if value is None else str(value) for value in values]
    order = list(dict.fromkeys(words))
    return Axis(title, _scaled([order.index(word) for word in words]), tuple(words))


def _loss_axis(losses: list[float]) -> Axis:
    return Axis("held-out loss", _scaled(losses), tuple(loss(value) for value in losses))


def _scaled(values: Sequence[float]) -> tuple[float, ...]:
    """Map values to 0 (lowest) to 1 (highest); all to the middle if they are the same."""
    low, high = min(values), max(values)
    return tuple((v - low) / (high - low) if high > low else 0.5 for v in values)


def _line(run: Run, index: int, axes: list[Axis], losses: list[float]) -> dict[str, Any]:
    tone = round(_scaled(losses)[index] * (NUM_TONES - 1)) + 1
    best = losses[index] == min(losses)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plotly_text(run.name),
        "meta": f"tone-{tone}",
        "x": list(range(len(axes))),
        "y": [axis.positions[index] for axis in axes],
        "line": {"width": 3.5 if best else 2},
        "marker": {"size": 9 if best else 7},
        "customdata": [f"{axis.title} {plotly_text(axis.labels[index])}" for axis in axes],
        "hovertemplate": "%{customdata}",
    }


def _layout(axes: list[Axis]) -> dict[str, Any]:
    last = len(axes) - 1
    return {
        "height": 380,
        "margin": {"l": 40, "r": 64, "t": 10, "b": 60},
        "hovermode": "closest",
        "showlegend": False,
        "xaxis": {
            "tickvals": list(range(len(axes))),
            "ticktext": [plotly_text(axis.title).replace(" ", "<br>") for axis in axes],
            "tickangle": 0,
            "range": [-0.15, last + 0.15],
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        },
        "yaxis": {"visible": False, "range": [-0.07, 1.07], "fixedrange": True},
        "shapes": [
            {"type": "line", "x0": axis, "x1": axis, "y0": 0, "y1": 1, "layer": "below"}
            for axis in range(len(axes))
        ],
        "annotations": [
            _tick(number, height, text, at_end=number == last)
            for number, axis in enumerate(axes)
            for height, text in _ticks(axis)
        ],
    }


def _ticks(axis: Axis) -> list[tuple[float, str]]:
    """Return the labelled heights: every value if they are few, else the lowest and the highest."""
    marks = sorted(set(zip(axis.positions, axis.labels, strict=True)))
    apart = all(b[0] - a[0] > 0.06 for a, b in itertools.pairwise(marks))
    return marks if len(marks) <= MAX_TICKS and apart else [marks[0], marks[-1]]


def _tick(axis: int, height: float, text: str, *, at_end: bool) -> dict[str, Any]:
    return {
        "x": axis,
        "y": height,
        "text": plotly_text(text),
        "showarrow": False,
        "xanchor": "left" if at_end else "right",
        "xshift": 9 if at_end else -9,
    }
