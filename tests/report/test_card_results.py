"""What card and report say of the GGUF files: which there are, and how llama.cpp compares."""

import pytest

from tests.report.test_model_card import read as read_card
from tests.support.report_examples import add_gguf, edit, write_run
from tests.support.report_pages import Page, read
from workflow.lib.artifacts.gguf_record import GgufChecks
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.report.html_page import render_page
from workflow.lib.report.model_card import model_card
from workflow.lib.settings.config import ReportConfig


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    add_gguf(folder)
    return folder


def card(folder):
    checks = read_record(folder / "convert_gguf" / "gguf.json", GgufChecks)
    return model_card(read_card(folder, gguf=checks))


def test_card_has_a_command_for_each_form(run):
    text = card(run)
    assert "llama-server -m demo-q4_k_m.gguf --jinja\n" in text
    assert "llama-server -m demo-base-q4_k_m.gguf --lora demo-adapter.gguf --jinja\n" in text


def test_card_tells_losses_their_bound_and_sizes(run):
    (row,) = [line for line in card(run).splitlines() if line.startswith("| <code>demo-q4")]
    assert row.split(" | ")[1:] == [
        "3.00 MiB",
        "1.5625",
        "1.5000",
        "+0.0625 (at most 0.3)",
        "96",
        "1 of 4 |",
    ]
    (row,) = [line for line in card(run).splitlines() if line.startswith("| <code>demo-base")]
    assert "4.00 MiB" in row, "the base and the adapter"


def test_card_of_a_run_without_gguf_files_has_no_such_section(tmp_path):
    assert "## GGUF" not in model_card(read_card(write_run(tmp_path, "demo", num_steps=3)))


def page(root, *, gguf):
    runs = read(root, "demo", gguf=gguf)
    return Page(render_page(runs, report=ReportConfig(), settings={"demo": {}}))


def test_report_shows_the_numbers_of_every_file(run, tmp_path):
    edit(run / "convert_gguf" / "gguf.json", lambda d: d["files"][0].update(loss=1.53125))
    shown = page(tmp_path, gguf=True)
    assert {1.53125, 0.03125, 1.5625, 0.0625, 96, 3 * 2**20, 4 * 2**20} <= shown.numbers
    assert "demo-adapter.gguf" in "".join(shown.text)


def test_report_shows_no_files_of_a_run_that_exports_none_any_more(run, tmp_path):
    assert "demo-q4_k_m.gguf" not in "".join(page(tmp_path, gguf=False).text)
