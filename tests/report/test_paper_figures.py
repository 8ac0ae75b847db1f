import struct
from pathlib import Path

import pytest

from tests.support.report_examples import edit, write_run
from workflow.lib.report.paper_figures import (
    DOTS_PER_INCH,
    WIDTH_INCHES,
    heldout_figure,
    loss_figure,
    write_paper_figures,
)
from workflow.lib.report.run_results import Run, read_runs


def read(root: Path, *names: str) -> list[Run]:
    tokens = {name: root / "tokens" / f"{name}-data" for name in names}
    return read_runs(root / "runs", names=list(names), tokens=tokens)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    for name in ("demo", "other"):
        write_run(tmp_path, name, num_steps=11)
    return read(tmp_path, "demo", "other")


def test_figures_are_png_files_of_print_width(tmp_path: Path, runs: list[Run]) -> None:
    paths = write_paper_figures(tmp_path / "figures", runs)
    assert sorted(path.name for path in paths) == ["heldout.png", "loss.png"]
    for path in paths:
        head = path.read_bytes()[:24]
        assert head.startswith(b"\x89PNG\r\n\x1a\n")
        assert struct.unpack(">I", head[16:20])[0] == WIDTH_INCHES * DOTS_PER_INCH


def test_loss_curve_holds_the_logged_losses(runs: list[Run]) -> None:
    lines = loss_figure(runs).axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [
        [step.loss for step in run.steps] for run in runs
    ]


def test_legend_names_the_quantized_base(runs: list[Run]) -> None:
    figure = heldout_figure(runs)
    assert figure is not None
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["NF4 base", "tuned"]


def test_interval_of_a_single_document_is_drawn(tmp_path: Path, runs: list[Run]) -> None:
    edit(
        tmp_path / "runs" / "demo" / "evaluate_run" / "tuned.json",
        lambda d: d["heldout"].update(loss_ci95=[1.5123456789, 1.5123456788999999]),
    )
    assert heldout_figure(read(tmp_path, "demo")) is not None


def test_run_without_heldout_loss_gives_the_loss_curve_only(
    tmp_path: Path, runs: list[Run]
) -> None:
    for subject in ("base", "tuned"):
        edit(
            tmp_path / "runs" / "demo" / "evaluate_run" / f"{subject}.json",
            lambda d: d.update(heldout=None),
        )
    paths = write_paper_figures(tmp_path / "figures", read(tmp_path, "demo"))
    assert [path.name for path in paths] == ["loss.png"]
