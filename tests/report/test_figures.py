import html

import plotly.graph_objects as go
import pytest

from tests.support.report_examples import HOSTILE, edit, write_run
from tests.support.report_pages import read
from workflow.lib.report.figures import (
    NUM_COLORS,
    PATTERNS,
    curve_figures,
    heldout_figure,
    memory_figure,
)
from workflow.lib.report.html_page import TEMPLATES
from workflow.lib.system.checksums import read_lines, write_lines


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path, "demo", num_steps=13)
    write_run(tmp_path, "other", num_steps=7)
    return read(tmp_path, "demo", "other")


def all_figures(runs):
    heldout = heldout_figure(runs)
    assert heldout is not None
    return [*curve_figures(runs), heldout, memory_figure(runs)]


def test_every_figure_is_valid_plotly(runs):
    for figure in all_figures(runs):
        go.Figure({"data": figure.data, "layout": figure.layout})  # raises on unknown properties


def test_curves_hold_the_logged_values(runs):
    loss = curve_figures(runs)[0]
    assert loss.data[1]["x"] == [step.step for step in runs[1].steps]
    assert loss.data[1]["y"] == [step.loss for step in runs[1].steps]


def test_terms_stack_up_to_the_predicted_peak(runs):
    figure = memory_figure(runs)
    stacked = sum(trace["x"][0] for trace in figure.data if trace["type"] == "bar")
    # sums of eleven doubles near 20: relative rounding of a few 1e-16 each
    assert stacked * 2**30 == pytest.approx(runs[0].preflight.peak_bytes, rel=1e-14)


def test_measured_peak_is_drawn_over_the_prediction(runs):
    (mark,) = [trace for trace in memory_figure(runs).data if trace["name"] == "measured peak"]
    assert mark["x"][0] * 2**30 == runs[0].summary.peak_bytes.measured


def test_every_term_of_a_run_looks_different(runs):
    looks = [(key.color, key.pattern) for key in memory_figure(runs).legend]
    assert len(looks) == len(runs[0].preflight.terms) > NUM_COLORS
    assert len(set(looks)) == len(looks)


def test_style_sheet_has_every_color_and_hatch_that_figures_name(runs):
    style = (TEMPLATES / "style.css").read_text()
    colors = {trace["meta"] for figure in all_figures(runs) for trace in figure.data}
    assert all(f"--{color}:" in style for color in colors)
    assert all(f".hatch-{number} " in style for number in range(1, len(PATTERNS)))


def test_plotly_takes_no_markup_from_a_name_and_breaks_a_long_one_for_phones(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    edit(folder / "preflight_run" / "preflight.json", lambda d: d["terms"][0].update(name=HOSTILE))
    runs = read(tmp_path, "demo")
    names = [trace["name"] for trace in memory_figure(runs).data]
    (name,) = [name for name in names if "alert" in name]
    lines = name.split("<br>")
    assert not any("<" in line or len(html.unescape(line)) > 24 for line in lines)
    assert "\x1b" not in name
    assert name.startswith("&lt;script&gt;")


def test_heldout_loss_of_the_base_is_labelled_as_that_of_the_quantized_one(runs):
    figure = heldout_figure(runs)
    assert figure is not None
    assert [trace["name"] for trace in figure.data] == ["NF4 base", "tuned"]
    assert figure.title == "Held-out loss: NF4 base, tuned"


def test_no_heldout_figure_without_heldout_loss(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    for subject in ("base", "tuned"):
        edit(folder / "evaluate_run" / f"{subject}.json", lambda d: d.update(heldout=None))
    runs = read(tmp_path, "demo")
    assert heldout_figure(runs) is None


def test_heldout_loss_while_training_is_drawn_where_it_was_measured(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=9)
    path = folder / "finetune" / "metrics.jsonl"
    rows = [
        row | ({"heldout_loss": 3.0 - row["step"] / 10} if row["step"] % 4 == 0 else {})
        for row in read_lines(path)
    ]
    write_lines(path, rows)
    runs = read(tmp_path, "demo")
    (figure,) = [figure for figure in curve_figures(runs) if figure.key == "heldout_loss"]
    assert (figure.data[0]["x"], figure.data[0]["y"]) == ([4, 8], [2.6, 2.2])
