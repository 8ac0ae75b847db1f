import re
import subprocess
import sys

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.support.browser import Visit, chromium, needs_chromium, visit
from tests.support.forked_stage import forked_stage
from tests.support.report_examples import HOSTILE, edit, write_run
from workflow.lib.system.checksums import read_lines

NUM_FIGURES = 7  # held-out loss, five curves, memory


# Of all runs: one gain is reached, the other missed.
EVALUATE = {"require": {"heldout_loss": 1.0, "pydocs_mc/acc": 0.5}}


def render(root, *names):
    settings = {name: {"evaluate": EVALUATE} for name in names}
    folders = [
        {"folder": str(root / "runs" / name), "tokens": str(root / "tokens" / f"{name}-data")}
        for name in names
    ]
    config = {"report": {"title": "Report"}, "runs": settings, "folders": folders}
    return forked_stage(
        "render_report", config=config, output=root / "report.html",
        comparison=root / "table.csv", log=root / "log" / "report.log",
    )  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two rendered runs, one with hostile text."""
    root = tmp_path_factory.mktemp("report")
    write_run(root, "demo", num_steps=13)
    folder = write_run(root, "other", num_steps=11, rate=5e-4)
    edit(folder / "preflight_run" / "preflight.json", lambda d: d["terms"][0].update(name=HOSTILE))
    edit(folder / "evaluate_run" / "tuned.json", lambda d: d["samples"][0].update(answer=HOSTILE))
    done = render(root, "demo", "other")
    assert done.returncode == 0, done.stderr
    return root


def test_stage_writes_page_table_and_log(root):
    assert (root / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert len((root / "table.csv").read_text().splitlines()) == 3
    assert (
        "run demo: held-out loss, NF4 base -> tuned: 2.9877 -> 1.5123"
        in (root / "log" / "report.log").read_text()
    )


def test_report_needs_no_torch():
    code = "import sys, workflow.scripts.render_report; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def light(root, browser):
    return visit(browser, root / "report.html", width=1280, scheme="light")


@pytest.fixture(scope="module")
def dark_phone(root, browser):
    return visit(browser, root / "report.html", width=360, scheme="dark")


@pytest.fixture(params=["light", "dark_phone"])
def either(request):
    found: Visit = request.getfixturevalue(request.param)
    return found


@needs_chromium
def test_browser_draws_every_figure_in_silence_and_asks_for_nothing(root, either):
    assert either.page.locator(".plot .plot-container").count() == NUM_FIGURES
    assert (either.console, either.dialogs) == ([], [])
    assert either.requests == [(root / "report.html").as_uri()]


@needs_chromium
def test_browser_paints_curves_from_the_style_sheet(light, dark_phone):
    """--series-1 of style.css."""
    for found, color in ((light, "rgb(31, 95, 191)"), (dark_phone, "rgb(130, 177, 255)")):
        line = found.page.locator("[data-figure=loss] .js-line").first
        assert color in str(line.get_attribute("style"))


@needs_chromium
def test_drawn_losses_are_those_of_the_file(root, light):
    drawn = light.page.evaluate("document.querySelector('[data-figure=loss]').data[0].y")
    steps = read_lines(root / "runs" / "demo" / "finetune" / "metrics.jsonl")
    assert drawn == [step["loss"] for step in steps]


@needs_chromium
def test_phone_never_scrolls_sideways(dark_phone):
    unfolded = "document.querySelectorAll('details').forEach((box) => { box.open = true })"
    dark_phone.page.evaluate(unfolded)
    assert dark_phone.page.evaluate("document.documentElement.scrollWidth") == 360


@needs_chromium
@pytest.mark.parametrize("box", [".scroll", "nav ol"])
def test_phone_shows_a_shadow_where_a_box_goes_on(dark_phone, box):
    """Two shadows stay at the sides; two covers of them move away with the content."""
    style = f"getComputedStyle(document.querySelector('{box}')).backgroundAttachment"
    assert dark_phone.page.evaluate(style).split(", ")[:4] == ["local", "local", "scroll", "scroll"]


@needs_chromium
def test_accessibility_audit_finds_nothing(either):
    """All rules of axe-core, contrast among them."""
    audit = Axe().run(either.page)
    assert audit.response["violations"] == [], audit.generate_report()
    assert len(audit.response["passes"]) > 20


@needs_chromium
def test_heading_sorts_by_number_and_by_keyboard(light):
    heading = light.page.locator("#comparison-numbers thead th", has_text="learning_rate")
    runs = light.page.locator("#comparison-numbers tbody th .run")
    heading.locator("button").focus()
    orders = []
    for _ in range(2):
        light.page.keyboard.press("Enter")
        orders.append((heading.get_attribute("aria-sort"), runs.all_inner_texts()))
    assert orders == [("ascending", ["demo", "other"]), ("descending", ["other", "demo"])]


@needs_chromium
def test_link_to_a_folded_part_opens_it(light):
    box = light.page.locator("#checks-demo details")
    assert box.get_attribute("open") is None
    light.page.evaluate("location.hash = 'checks-demo'")
    light.page.wait_for_selector("#checks-demo details[open]")


@needs_chromium
def test_first_stop_of_the_keyboard_skips_to_the_results(light):
    light.page.evaluate("location.hash = ''")
    light.page.reload()
    light.page.keyboard.press("Tab")
    light.page.keyboard.press("Enter")
    assert light.page.evaluate("document.activeElement.id") == "main"


PRINTED = """() => {
  const rgb = (value) => value.match(/[0-9.]+/g).slice(0, 3).map(Number);
  const all = { contentVisibilityAuto: true, visibilityProperty: true };
  const height = (element) => element.getBoundingClientRect().height;
  const seen = (element) => element.checkVisibility(all) && height(element) > 0;
  const style = getComputedStyle(document.body);
  return {
    paper: rgb(style.backgroundColor), ink: rgb(style.color),
    navigation: [...document.querySelectorAll("nav, .modebar")].filter(seen).length,
    folded: [...document.querySelectorAll("details:not([open]):not(.of-run) > :not(summary)")]
      .filter((element) => !element.closest("details.of-run:not([open])")).map(seen),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    widest: Math.max(
      ...[...document.querySelectorAll(".main-svg")].map((e) => e.getBoundingClientRect().width)
    ),
  };
}"""
PAPER_WIDTH = 700  # pixels between the margins of A4


@needs_chromium
def test_page_prints_dark_on_white_unfolded_and_within_the_paper(browser, root):
    """Also for a reader in dark mode."""
    page = visit(browser, root / "report.html", scheme="dark").page
    page.set_viewport_size({"width": PAPER_WIDTH, "height": 990})
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    printed = page.evaluate(PRINTED)
    assert printed["paper"] == [255, 255, 255]
    assert max(printed["ink"]) < 80
    assert printed["navigation"] == 0
    assert printed["folded"], "the report folds its details"
    assert all(printed["folded"])
    assert printed["overflow"] <= 0
    assert 300 < printed["widest"] <= PAPER_WIDTH
    pages = len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4")))
    assert 5 <= pages <= 40
