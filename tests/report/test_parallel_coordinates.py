"""A sweep as parallel coordinates: every run's settings and its loss at the right heights."""

from pathlib import Path

import plotly.graph_objects as go
import pytest

from tests.support.report_examples import edit, write_run
from workflow.lib.report.figures import Figure
from workflow.lib.report.html_page import TEMPLATES
from workflow.lib.report.parallel_coordinates import MAX_AXES, NUM_TONES, parallel_figure
from workflow.lib.report.run_results import Run, read_runs

LOSSES = {"a": 1.5, "b": 1.25, "c": 2.25}


def read(root: Path, *names: str) -> list[Run]:
    tokens = dict.fromkeys(names, root / "tokens" / "a-data")
    return read_runs(root / "runs", names=list(names), tokens=tokens)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three runs: rank 4, 16, 64 with alpha twice that; the third with a tenth of the rate."""
    for name, rank, rate in (("a", 4, 1e-3), ("b", 16, 1e-3), ("c", 64, 1e-4)):
        folder = write_run(tmp_path, name, num_steps=3, rate=rate)
        edit(
            folder / "finetune" / "summary.json",
            lambda d, r=rank: d["settings"]["lora"].update(r=r, alpha=2.0 * r),
        )
        edit(
            folder / "evaluate_run" / "tuned.json",
            lambda d, n=name: d["heldout"].update(loss=LOSSES[n]),
        )
    return tmp_path


def drawn(root: Path, *names: str) -> Figure:
    figure = parallel_figure(read(root, *names))
    assert figure is not None
    return figure


def titles(figure: Figure) -> list[str]:
    return [text.replace("<br>", " ") for text in figure.layout["xaxis"]["ticktext"]]


def test_axes_are_the_differing_settings_and_then_the_loss(root: Path) -> None:
    assert titles(drawn(root, "a", "b", "c")) == ["lora.r", "learning rate", "held-out loss"]


def test_setting_that_changes_with_another_is_named_and_not_drawn_twice(root: Path) -> None:
    assert "lora.alpha changed together with lora.r." in drawn(root, "a", "b", "c").caption


def test_heights_are_logarithmic_over_a_factor_of_ten_and_linear_in_the_loss(root: Path) -> None:
    heights = {trace["name"]: trace["y"] for trace in drawn(root, "a", "b", "c").data}
    # ranks 4, 16, 64: equal steps of a logarithm; losses 1.5, 1.25, 2.25: a quarter of the way for
    # a
    assert heights["a"] == pytest.approx([0.0, 1.0, 0.25])
    assert heights["b"] == pytest.approx([0.5, 1.0, 0.0])
    assert heights["c"] == pytest.approx([1.0, 0.0, 1.0])


def test_every_value_is_written_at_its_height(root: Path) -> None:
    notes = drawn(root, "a", "b", "c").layout["annotations"]
    written = {(note["x"], note["text"]): note["y"] for note in notes}
    assert written[0, "16"] == pytest.approx(0.5)
    assert written[1, "0.0001"] == 0.0
    assert written[2, "1.2500"] == 0.0


def test_lowest_loss_has_the_first_tone_and_the_widest_line(root: Path) -> None:
    traces = {trace["name"]: trace for trace in drawn(root, "a", "b", "c").data}
    assert traces["b"]["meta"] == "tone-1"
    assert traces["c"]["meta"] == f"tone-{NUM_TONES}"
    assert max(traces, key=lambda name: traces[name]["line"]["width"]) == "b"


def test_style_sheet_has_every_tone() -> None:
    style = (TEMPLATES / "style.css").read_text()
    assert all(style.count(f"--tone-{tone}:") == 2 for tone in range(1, NUM_TONES + 1))


def test_figure_is_valid_plotly(root: Path) -> None:
    figure = drawn(root, "a", "b", "c")
    go.Figure({"data": figure.data, "layout": figure.layout})  # raises on unknown properties


def test_one_run_has_no_figure(root: Path) -> None:
    assert parallel_figure(read(root, "a")) is None


def test_runs_of_equal_settings_have_no_figure(root: Path) -> None:
    write_run(root, "d", num_steps=3)
    write_run(root, "e", num_steps=3)
    assert parallel_figure(read(root, "d", "e")) is None


def test_settings_beyond_the_last_axis_are_named(root: Path) -> None:
    """Bit patterns: no two of the nine settings group the eight runs alike."""
    names = [f"m{number}" for number in range(8)]
    for number, name in enumerate(names):
        folder = write_run(root, name, num_steps=3)
        extra = {
            f"extra_{key}": (number * key + number // (key + 1)) % (key + 2) for key in range(1, 10)
        }
        edit(
            folder / "finetune" / "summary.json",
            lambda d, e=extra: d["settings"]["train"].update(e),
        )
    figure = drawn(root, *names)
    assert len(figure.layout["xaxis"]["ticktext"]) == MAX_AXES + 1
    assert "Not drawn: train.extra_" in figure.caption
