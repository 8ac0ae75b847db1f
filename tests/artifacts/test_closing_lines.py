"""The last lines of a finished command."""

import json
import os

import pytest

from tests.support.report_examples import add_forgetting, write_run
from workflow.lib.artifacts.closing_lines import closing_lines

NOW, BEFORE = 2_000_000_000.0, 1_000_000_000.0


@pytest.fixture
def results(tmp_path):
    run = write_run(tmp_path, "demo", num_steps=3)
    for file in run.rglob("*.json"):
        os.utime(file, (NOW, NOW))
    return tmp_path


def lines(results, **changes):
    return closing_lines(results, "demo", **{"served": "tuned", "since": BEFORE} | changes)


def test_run_that_the_command_did_not_touch_has_no_lines(results):
    assert lines(results, since=NOW + 1) == []


def test_losses_before_and_after_come_from_the_evaluation(results):
    measured = {
        name: json.loads((results / f"runs/demo/evaluate_run/{name}.json").read_text())["heldout"]
        for name in ("base", "tuned")
    }
    before, after = (measured[name]["loss"] for name in ("base", "tuned"))
    assert lines(results)[:2] == [
        "run demo",
        f"  loss       {before:.3f} -> {after:.3f} held out, nats per token (base -> tuned)",
    ]


@pytest.mark.parametrize(("rise", "warned"), [(0.125, True), (0.0, False)])
def test_model_that_got_worse_at_other_texts_is_in_the_last_lines(results, rise, warned):
    add_forgetting(results / "runs" / "demo", rise)
    (*found,) = (line for line in lines(results) if line.startswith("  warning"))
    assert len(found) == warned
    assert all("tuned model got worse at texts of other kinds: +0.1250 [" in line for line in found)


def test_run_without_evaluation_shows_losses_of_the_training(results):
    for file in (results / "runs/demo/evaluate_run").iterdir():
        file.unlink()
    assert lines(results)[1].endswith(" of the training (first step -> last steps)")
    assert lines(results)[-1] == "  talk to it python -m workflow.scripts.chat demo"
