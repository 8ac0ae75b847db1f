import pytest

from tests.support.report_examples import edit, write_run
from tests.support.report_pages import read
from workflow.lib.system.errors import UserError


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path, "demo", num_steps=13)


def test_scores_pair_every_metric_with_its_difference(tmp_path, folder):
    (run,) = read(tmp_path, "demo")
    assert [
        (s.metric, s.before.value, s.after.value, s.difference.difference)
        for s in run.measured.scores
    ] == [("acc", 0.2519, 0.6137, 0.3618), ("acc_norm", 0.2777, 0.6331, 0.3554)]


def test_checks_hold_preflight_training_and_parity(tmp_path, folder):
    edit(folder / "consolidate" / "parity.json", lambda d: d.update(passed=False))
    edit(folder / "preflight_run" / "preflight.json", lambda d: d.update(verdict="does_not_fit"))
    (run,) = read(tmp_path, "demo")
    assert [check.passed for check in run.checks] == [False, True, True, True, False]
    assert [check.name[:12] for check in run.failed_checks] == ["Preflight: t", "The exported"]


def _other_run(document):
    document["run"] = "other"


def _other_prompt(document):
    document["samples"][1]["document"] = 12


def _other_task(document):
    document["tasks"]["other"] = document["tasks"].pop("pydocs_mc")


def _fewer_documents(document):
    document["heldout"]["documents"] = 126


def _no_difference(document):
    del document["comparisons"]["base"]["tasks"]["pydocs_mc"]["acc"]


def _swapped(document):
    document["subject"] = "base"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("finetune/summary.json", _other_run, r"summary\.json: run = 'other' does not agree with"),
        ("evaluate_run/base.json", _other_run, r"base\.json: run = 'other' does not agree with"),
        ("evaluate_run/tuned.json", _swapped, r"tuned\.json: subject = 'base' does not agree with"),
        (
            "evaluate_run/tuned.json",
            _other_prompt,
            r"tuned\.json: samples\.document = \[3, 12, 29\]",
        ),
        ("evaluate_run/tuned.json", _other_task, r"tuned\.json: tasks = \{'other'"),
        ("evaluate_run/tuned.json", _no_difference, r"tuned\.json: comparisons\.tasks = "),
        ("evaluate_run/tuned.json", _fewer_documents, r"tuned\.json: heldout\.documents = 126"),
        (
            "finetune/summary.json",
            lambda d: d.update(seq_len=256),
            r"summary\.json: seq_len = 256 .*manifest\.json = 257",
        ),
        (
            "finetune/summary.json",
            lambda d: d.update(num_steps=12),
            r"metrics\.jsonl: step = 13 does not agree with .*num_steps = 12",
        ),
    ],
)
def test_files_of_different_runs_are_refused(tmp_path, folder, file, change, message):
    edit(folder / file, change)
    with pytest.raises(UserError, match=message):
        read(tmp_path, "demo")
