"""The verdict of a page: held-out loss, tasks, checks, required gain, and the best of a sweep."""

import re

import pytest

from tests.support.report_examples import add_forgetting, add_original, edit, write_run
from tests.support.report_pages import Page, read, rendered
from workflow.lib.report.html_page import render_page
from workflow.lib.settings.config import ReportConfig


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([0.1, 0.3], "Held-out loss is lower than the NF4 base's"),
        ([-0.1, 0.3], "Held-out loss is not clearly different from the NF4 base's"),
        ([-0.3, -0.1], "Held-out loss is higher than the NF4 base's"),
    ],
)
def test_verdict_follows_the_interval_of_the_difference(tmp_path, ends, words):
    folder = write_run(tmp_path, "demo", num_steps=3)
    edit(
        folder / "evaluate_run" / "tuned.json",
        lambda d: d["comparisons"]["base"].update(loss_difference_ci95=ends),
    )
    assert f"<h3>{words}</h3>" in rendered(tmp_path, "demo")


def test_few_documents_have_no_verdict(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    edit(
        folder / "evaluate_run" / "tuned.json",
        lambda d: d["comparisons"]["base"].update(documents=5, loss_difference_ci95=None),
    )
    words = "Only 5 held-out documents: too few to show a difference (6 are needed)"
    page = " ".join("".join(Page(rendered(tmp_path, "demo")).text).split())
    assert words in page


@pytest.mark.parametrize(
    ("documents", "gains", "words"),
    [
        (8, [0.5] * 8, "1 is clearly worse: by the paired 95% interval, corrected for all 3 pairs"),
        (8, [0.5] * 5 + [-0.4] * 3, "None of the others is clearly worse"),
        (6, [0.5] * 6, "None of the others is clearly worse"),
    ],
)
def test_runs_are_compared_with_the_best_on_the_same_documents(tmp_path, documents, gains, words):
    """Of 6 documents that all agree p is 1/32, and 3/32 if it is corrected."""
    for name, behind in (("best", [0.0] * documents), ("worse", gains), ("equal", [0.0] * 8)):
        losses = [
            {"document": n, "source": "qa", "loss_sum": 10.0 + gain, "tokens": 5}
            for n, gain in enumerate(behind[:documents])
        ]
        loss = 2.0 + sum(behind) / 40 + 1e-3 * (name == "equal")
        edit(
            better(tmp_path, name, loss) / "evaluate_run" / "tuned.json",
            lambda d, losses=losses: d["heldout"].update(per_document=losses),
        )
    page = rendered(tmp_path, "best", "worse", "equal")
    assert words in " ".join("".join(Page(page).text).split())


def better(root, name, loss):
    """Write a run with this held-out loss."""
    folder = write_run(root, name, num_steps=3, rate=loss / 1000)
    edit(folder / "evaluate_run" / "tuned.json", lambda d: d["heldout"].update(loss=loss))
    return folder


def test_best_run_of_a_sweep_comes_first(tmp_path):
    for name, loss in (("one", 1.7), ("two", 1.2), ("three", 1.5)):
        better(tmp_path, name, loss)
    page = rendered(tmp_path, "one", "two", "three")
    first, rest = page.split("</article>", 1)
    assert 'Best of 3 runs: <span class="run">two</span>' in first.replace("\n", " ")
    assert "The other 2 runs in the same detail" in rest


def test_every_form_is_open_for_the_best_run_alone(tmp_path):
    names = ("one", "two", "three")
    for name, loss in zip(names, (1.7, 1.2, 1.5), strict=True):
        add_original(better(tmp_path, name, loss), loss=2.5)
    tags = re.findall(r"<details([^>]*)>\s*<summary>Every form", rendered(tmp_path, *names))
    assert [tag.endswith(" open") for tag in tags] == [False, True, False]
    (alone,) = re.findall(r"<details([^>]*)>\s*<summary>Every form", rendered(tmp_path, "one"))
    assert alone.endswith(" open")


def test_run_that_got_worse_or_failed_is_named_before_the_best(tmp_path):
    for name, loss in (("one", 1.2), ("two", 1.7)):
        better(tmp_path, name, loss)
    edit(
        tmp_path / "runs" / "two" / "evaluate_run" / "tuned.json",
        lambda d: d["comparisons"]["base"].update(loss_difference_ci95=[-0.3, -0.1]),
    )
    warned = rendered(tmp_path, "one", "two").split("<article")[0].rpartition("Look at")[2]
    assert "two" in warned
    assert "held-out loss is higher than the NF4 base" in warned


WORSE = "The tuned model got worse at texts of other kinds"


@pytest.mark.parametrize(
    ("rise", "width", "warned"),
    [(0.0625, 0.03125, True), (0.0469, 0.03125, False), (0.0625, 0.125, False)],
)
def test_model_that_got_clearly_worse_at_other_texts_is_warned_of(tmp_path, rise, width, warned):
    add_forgetting(write_run(tmp_path, "demo", num_steps=3), rise, width=width)
    page = rendered(tmp_path, "demo")
    text = " ".join("".join(Page(page).text).split())
    assert (f"{WORSE}: +{rise:.4f} [" in text) is warned
    ends = f"[{rise - width:+.4f}, {rise + width:+.4f}]".replace("-", "\N{MINUS SIGN}")
    assert f"+{rise:.4f} {ends} nats per token (tuned \N{MINUS SIGN} NF4 base) at 40 texts" in text
    assert f"code +{rise:.4f}, prose +{rise:.4f}" in text
    assert "Loss of other texts by kind" in text


def test_forgetful_run_of_several_is_named_before_the_best(tmp_path):
    for name, loss in (("one", 1.2), ("two", 1.7)):
        add_forgetting(better(tmp_path, name, loss), 0.5 if name == "two" else 0.0)
    page = rendered(tmp_path, "one", "two")
    warned = page.split("<article")[0].rpartition("Look at")[2]
    assert ("worse at other texts" in warned, "one" in warned) == (True, False)
    assert "other texts, served &minus; reference" in page


def with_gate(root, require, *, by="estimate"):
    """Return the text of the page of a run that gained 1.4753 [1.3711, 1.5802] of held-out loss,
    with this gate."""
    write_run(root, "demo", num_steps=3)
    evaluate = {"require": require, "require_by": by}
    page = render_page(
        read(root, "demo"), report=ReportConfig(), settings={"demo": {"evaluate": evaluate}}
    )
    return " ".join("".join(Page(page).text).split())


@pytest.mark.parametrize(
    ("least", "by", "found"),
    [(1.4, "estimate", "reached"), (1.4, "interval", "missed"), (1.5, "estimate", "missed")],
)
def test_gate_is_in_the_verdict_as_its_stage_will_judge(tmp_path, least, by, found):
    text = with_gate(tmp_path, {"heldout_loss": least}, by=by)
    asked = (
        f"{found} heldout_loss gained +1.4753 [+1.3711, +1.5802] over the NF4 base; at least "
        f"+{least:.4f} was asked"
    )
    assert asked in text
    assert ("The required gain is missed: the workflow ends" in text) is (found == "missed")


def test_gate_that_cannot_be_judged_says_why(tmp_path):
    text = with_gate(tmp_path, {"pydocs_mc/f1": 0.1})
    assert "The required gain cannot be judged" in text
    assert "pydocs_mc/f1': it is not measured. Known: pydocs_mc/acc" in text
