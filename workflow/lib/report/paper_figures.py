"""The figures of a paper, as PNG files: the loss curves and the held-out comparison.

Drawn by Matplotlib's object interface with the Agg renderer: no display, no browser, no global
state.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workflow.lib.report.run_results import Run
from workflow.lib.settings.subjects import SUBJECT_LABELS, SUBJECTS, SubjectName
from workflow.lib.system.files import atomic_path

WIDTH_INCHES = 5.5  # text width of the common one-column conference styles
DOTS_PER_INCH = 300
# Okabe and Ito, "Color Universal Design", 2008: told apart with every form of colour blindness.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SUBJECT_COLORS: dict[SubjectName, str] = {
    "original": "#000000",
    "base": "#767676",
    "tuned": COLORS[0],
    "tuned_on_original": COLORS[1],
    "merged": COLORS[2],
}


def write_paper_figures(folder: Path, runs: list[Run]) -> list[Path]:
    """Write `loss.png`, and `heldout.png` if a run has a held-out loss, into `folder`; return the
    paths.
    """
    figures = {"loss.png": loss_figure(runs), "heldout.png": heldout_figure(runs)}
    return [
        save_figure(folder / name, figure) for name, figure in figures.items() if figure is not None
    ]


def loss_figure(runs: list[Run]) -> Figure:
    """Return training loss over optimizer steps, a line per run."""
    figure, axes = _axes(height_inches=3.2)
    for index, run in enumerate(runs):
        axes.plot(
            [step.step for step in run.steps],
            [step.loss for step in run.steps],
            label=run.name,
            color=COLORS[index % len(COLORS)],
            linewidth=1.0,
            marker="." if len(run.steps) == 1 else None,
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss (nats per token)")
    if len(runs) > 1:
        axes.legend(frameon=False)
    return figure


def heldout_figure(runs: list[Run]) -> Figure | None:
    """Return held-out loss of all subjects with 95% intervals, a row per run; None if no run has
    it.
    """
    measured = [run for run in runs if run.measured.served.heldout]
    if not measured:
        return None
    shown = [name for name in SUBJECTS if any(name in run.measured.subjects for run in measured)]
    figure, axes = _axes(height_inches=1.1 + (0.1 + 0.1 * len(shown)) * len(measured))
    for position, subject in enumerate(shown):
        shift = 0.48 * (position - (len(shown) - 1) / 2) / len(shown)
        label: str | None = SUBJECT_LABELS[subject]
        for row, run in enumerate(measured):
            found = run.measured.subjects.get(subject)
            if found is None or found.heldout is None:
                continue
            (low, high), color = found.heldout.loss_ci95, SUBJECT_COLORS[subject]
            axes.hlines(row + shift, low, high, color=color, linewidth=1.5)
            point = [found.heldout.loss]
            axes.plot(point, [row + shift], "o", color=color, markersize=4, label=label)
            label = None
    axes.set_yticks(range(len(measured)), [run.name for run in measured])
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.set_xlabel("held-out loss (nats per token), 95% interval")
    figure.legend(loc="outside upper right", ncols=len(shown), frameon=False)
    return figure


def _axes(*, height_inches: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)
    return figure, axes


def axes_of_rows(labels: list[str], *, columns: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of `columns` plots side by side that share a row per label, the first on
    top.
    """
    size = (WIDTH_INCHES + 1.5, 1.2 + 0.3 * len(labels))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    plots = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    plots[0].set_yticks(range(len(labels)), labels)
    plots[0].set_ylim(len(labels) - 0.5, -0.5)
    for axes in plots:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.5, axis="x")
    return figure, list(plots)


def save_figure(path: Path, figure: Figure) -> Path:
    """Write a figure as PNG; return `path`."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DOTS_PER_INCH)
    return path
