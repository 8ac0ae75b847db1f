import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report_examples import HOSTILE, edit, write_run

NUM_FIGURES = 7  # held-out loss, five curves, memory
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"
)


def render(root: Path, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workflow.scripts.render_report", "--config"]
    command += [json.dumps({"report": {"title": "Report"}}), "--runs-dir", str(root / "runs")]
    for name in names:
        command += ["--run", name, "--tokens", f"{name}={root / 'tokens' / f'{name}-data'}"]
    command += ["--output", str(root / "report.html"), "--comparison", str(root / "table.csv")]
    command += ["--figures", str(root / "figures"), "--log", str(root / "log" / "report.log")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open `page` in headless Chromium and return its document after all scripts ran, with the browser's log."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        f"--user-data-dir={page.parent / 'profile'}",
        *("--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom"),
        *options,
        page.as_uri(),
    ]
    environment = os.environ | {"HOME": str(page.parent)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=environment
    )


def console(browsed: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in browsed.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rendered runs, one with hostile text."""
    root = tmp_path_factory.mktemp("report")
    write_run(root, "demo", num_steps=13)
    folder = write_run(root, "other", num_steps=11)
    edit(folder / "preflight_run" / "preflight.json", lambda d: d["terms"][0].update(name=HOSTILE))
    edit(folder / "evaluate_run" / "tuned.json", lambda d: d["samples"][0].update(answer=HOSTILE))
    done = render(root, "demo", "other")
    assert done.returncode == 0, done.stderr
    return root


def test_stage_writes_page_table_figures_and_log(root: Path) -> None:
    assert (root / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert len((root / "table.csv").read_text().splitlines()) == 3
    assert sorted(p.name for p in (root / "figures").iterdir()) == ["heldout.png", "loss.png"]
    assert "run demo: held-out loss 2.9877 -> 1.5123" in (root / "log" / "report.log").read_text()


def test_mistake_of_the_user_is_one_message_and_no_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "demo", num_steps=3)
    edit(folder / "consolidate" / "parity.json", lambda d: d.pop("tolerance"))
    done = render(tmp_path, "demo")
    assert done.returncode == 1
    assert "parity.json: the field tolerance is missing" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "report.html").exists()


def test_tokens_option_without_folder_is_explained(tmp_path: Path) -> None:
    write_run(tmp_path, "demo", num_steps=3)
    command = [sys.executable, "-m", "workflow.scripts.render_report", "--config", '{"report": {}}']
    command += ["--runs-dir", str(tmp_path / "runs"), "--run", "demo", "--tokens", "demo"]
    command += ["--output", "a", "--comparison", "b", "--figures", "c"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == (
        "--tokens = 'demo': must be NAME=DIR. Give a run and its tokens folder.\n"
    )


def test_report_needs_no_torch() -> None:
    code = "import sys, workflow.scripts.render_report; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_draws_every_figure_without_a_console_message(root: Path, scheme: str) -> None:
    chosen = {"light": 1, "dark": 0}[scheme]
    browsed = browse(root / "report.html", f"--blink-settings=preferredColorScheme={chosen}")
    assert console(browsed) == []
    # Plotly makes three of these per figure: the plot, the layer of annotations, and one for hovering
    drawn = browsed.stdout.count('class="plot-container')
    assert drawn == NUM_FIGURES
    assert browsed.stdout.count('class="main-svg"') >= NUM_FIGURES


@needs_chromium
def test_browser_paints_curves_from_the_style_sheet(root: Path) -> None:
    # --series-1 of style.css, light and dark
    for chosen, color in ((1, "rgb(31, 95, 191)"), (0, "rgb(130, 177, 255)")):
        browsed = browse(root / "report.html", f"--blink-settings=preferredColorScheme={chosen}")
        assert f"stroke: {color}" in browsed.stdout


@needs_chromium
def test_browser_would_report_a_blocked_script(root: Path, tmp_path: Path) -> None:
    page = (root / "report.html").read_text(encoding="utf-8")
    injected = tmp_path / "injected.html"
    injected.write_text(
        page.replace("<main", "<script>alert(1)</script><main", 1), encoding="utf-8"
    )
    assert any("Content Security Policy" in line for line in console(browse(injected)))
