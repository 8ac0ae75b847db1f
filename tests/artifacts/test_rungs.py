import pytest

from workflow.lib.artifacts.layout import checkpoint_dir, tokens_dir
from workflow.lib.artifacts.records import Provenance
from workflow.lib.artifacts.rungs import Rung, RungRun, run_of, saved_by, with_rungs
from workflow.lib.settings.config import load_config, load_sweep
from workflow.lib.system.errors import UserError

TRAIN = {"epochs": None, "max_steps": 200, "lr_schedule": "constant", "warmup_share": 0.0}
DOCUMENT = {"train": TRAIN, "sweep": {"rungs": [50, 200]}, "runs": {"a": {}, "b": {}}}


def expanded(**changes):
    document = DOCUMENT | changes
    return with_rungs(load_config(document)[1], load_sweep(document))


def test_run_at_a_rung_is_the_run_with_fewer_steps_of_which_only_the_loss_is_measured():
    runs = expanded(export={"merged": True, "steps": [10, 60]})
    assert list(runs) == ["a", "b", "a@50", "b@50"]
    rung, run = runs["a@50"], runs["a"]
    assert rung.train == run.train.model_copy(update={"max_steps": 50})
    assert (rung.rung_of, run_of("a@50"), run_of("a")) == ("a", "a", "a")
    assert (rung.evaluate.tasks, rung.evaluate.samples, rung.served) == ((), 0, "tuned")
    assert not rung.export.merged
    assert rung.export.steps == (10,), "checkpoints that the whole run exports stay"
    assert tokens_dir(rung) == tokens_dir(run)


@pytest.mark.parametrize(("schedule", "shared"), [("constant", True), ("cosine", False)])
def test_rungs_share_checkpoints_where_more_steps_continue_a_run(schedule, shared):
    runs = expanded(train=TRAIN | {"lr_schedule": schedule})
    folders = {checkpoint_dir(name, runs[name]) for name in ("a", "a@50")}
    assert (len(folders) == 1) is shared


def test_without_rungs_there_are_only_the_runs_of_the_user():
    assert list(expanded(sweep={})) == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sweep": {"rungs": [50, 50, 200]}}, "entry 2 stands there twice"),
        ({"sweep": {"rungs": [100, 50, 200]}}, "50 does not rise above 100"),
        ({"sweep": {"rungs": [200]}}, "one alone decides nothing"),
        ({"sweep": {"rungs": [0, 200]}}, "must be at least 1"),
        ({"sweep": {"keep": 0.5}}, "without rungs it decides nothing"),
        ({"sweep": {"rungs": [50, 100]}}, r"run a has another end .*max_steps = 200"),
        ({"train": {"epochs": 1.0}}, r"run a has another end .*epochs = 1.0"),
        ({"runs": {"a": {}}}, "the only run is a"),
        ({"evaluate": {"heldout": False}}, "run a measures no held-out loss"),
        ({"runs": {"a": {}, "b": {"data": {"seq_len": 64}}}}, "a and b have different tokens"),
        ({"runs": {"a": {}, "b": {"train": {"start_from": "a"}}}}, "run b starts from run a"),
    ],
)
def test_runs_that_a_rung_cannot_compare_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        expanded(**changes)


def rung(steps, *, ended=(), runs="abc", continued=True):
    found = [
        RungRun(
            run=name,
            loss=1.0,
            behind=0.0,
            behind_ci95=None,
            goes_on=name not in ended,
            reason="surely worse" if name in ended else "not surely worse",
            device_hours=steps / 100,
            continued=continued,
        )
        for name in runs
    ]
    return Rung(steps=steps, keep=1.0, documents=1, runs=found, provenance=Provenance.now())


@pytest.mark.parametrize(("continued", "saved"), [(True, 250), (False, 50)])
def test_steps_saved_are_those_not_trained_without_those_trained_again(continued, saved):
    """c ends at 50 of 200 steps, b at 100; trained anew, b takes 150 steps and a takes 350."""
    how = {"continued": continued}
    rungs = [rung(50, ended="c", **how), rung(100, ended="b", runs="ab", **how)]
    found = saved_by(rungs, 200)
    assert (found.steps, found.of_steps) == (saved, 600)
    assert found.device_hours == pytest.approx(saved / 100)
