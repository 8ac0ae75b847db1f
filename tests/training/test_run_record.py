"""The record of a run: its lines, its history, and a summary that counts all steps, logged or
not."""

import pytest

from tests.support.captures import ALONE
from tests.support.distributed import run_in_group
from tests.support.finished import BATCH, CONFIG, PREDICTED_BYTES, ROWS, SEQ_LEN, STEPS
from tests.support.models import random_store
from workflow.lib.artifacts.training_record import Step
from workflow.lib.settings.schedule import step_rows
from workflow.lib.system.checksums import read_lines
from workflow.lib.system.files import read_checked_json
from workflow.lib.training import run_record
from workflow.lib.training.checkpoint import Resumed, TrainingClock
from workflow.lib.training.run_record import CHECKPOINTS, DATA, Journal, trained_tokens

METRICS = Step(
    step=1,
    loss=5.0,
    grad_norm=1.5,
    learning_rate=1e-3,
    trained_tokens=40,
    tokens=92,
    tokens_per_s=184.0,
    peak_bytes=2**30,
    elapsed_s=0.5,
)


@pytest.fixture(scope="module")
def summary(run):
    return read_checked_json(run / "finetune" / "summary.json")


def test_folder_has_what_the_design_promises(run):
    names = {
        "adapter",
        "adapter_config.json",
        "metrics.jsonl",
        "summary.json",
        "parity.safetensors",
    }
    assert {p.name for p in (run / "finetune").iterdir()} == names
    assert not list(run.glob(".*.partial"))


def test_summary_states_the_run(summary):
    expected = {
        "run": "demo",
        "device": "cpu",
        "device_name": "CPU",
        "processes": 2,
        "num_steps": STEPS,
        "resumed_from_steps": [],
        "global_batch_size": BATCH,
        "micro_batch_size": 1,
        "accumulation_steps": 2,
        "seq_len": SEQ_LEN,
        "tokens": STEPS * BATCH * SEQ_LEN,
    }
    assert {key: summary[key] for key in expected} == expected
    assert summary["peak_bytes"]["predicted"] == PREDICTED_BYTES
    assert summary["peak_bytes"]["kind"] == "host_rss"
    assert summary["peak_bytes"]["measured"] > 100 * 2**20
    assert summary["fingerprint"] == "0123456789ab"


def test_predicted_and_measured_times_stand_side_by_side(summary):
    times = summary["times"]
    assert times["predicted_step_s"] is None  # the plan of these tests knows no speed
    assert 0 < times["measured_step_s"] < summary["elapsed_s"]
    assert set(times["parts_s"]) >= {run_record.STEPS, DATA, CHECKPOINTS}
    steps_s = times["parts_s"][run_record.STEPS] + times["parts_s"][DATA]
    assert steps_s == pytest.approx(summary["elapsed_s"], rel=1e-6)


def test_parameters_are_counted_as_weights_and_not_as_bytes(summary):
    """By hand: q, o 80x80; k, v 16x80; gate, up, down 176x80; rank 3; three layers."""
    linears = 2 * 80 * 80 + 2 * 16 * 80 + 3 * 176 * 80
    adapters = 3 * (2 * (80 + 80) + 2 * (16 + 80) + 3 * (176 + 80))
    plain = 2 * 211 * 80 + (2 * 3 + 1) * 80
    assert summary["trainable_parameters"] == 3 * adapters
    attention = 3 * 3 * (2 * (80 + 80) + 2 * (16 + 80))
    by_module = {"self_attn": attention, "mlp": 3 * adapters - attention}
    assert summary["trainable_by_module"] == by_module
    assert summary["total_parameters"] == 3 * (linears + adapters) + plain


def test_lines_are_the_first_step_and_every_third(run):
    rows = read_lines(run / "finetune" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 3, 6]


def test_time_is_that_of_all_steps_also_of_those_without_a_line(run, summary):
    """The seventh step has none."""
    rows = read_lines(run / "finetune" / "metrics.jsonl")
    assert summary["elapsed_s"] > rows[-1]["elapsed_s"]
    assert summary["tokens_per_s"] == pytest.approx(summary["tokens"] / summary["elapsed_s"])


def test_trained_tokens_are_counted_over_the_rows_in_order(summary):
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    rows = [
        row
        for step in range(STEPS)
        for row in step_rows(num_rows=ROWS, global_batch_size=BATCH, seed=0, step=step)
    ]
    assert len(rows) > 2 * ROWS, "more than two epochs"
    expected = sum(int(store.loss_mask[row].sum()) for row in rows)
    assert summary["trained_tokens"] == expected
    assert trained_tokens(store, CONFIG.train, num_steps=STEPS) == expected


def test_a_line_a_minute_tells_progress_where_no_terminal_has_a_bar(tmp_path, caplog, monkeypatch):
    clock = {"s": 100.0}
    monkeypatch.setattr(run_record.time, "monotonic", lambda: clock["s"])
    monkeypatch.setattr(run_record.sys.stderr, "isatty", lambda: False, raising=False)
    monkeypatch.setattr(run_record.dist, "broadcast_object_list", lambda *_, **__: None)
    with caplog.at_level("INFO", logger="workflow"):
        start = Resumed(0, [], None)
        journal = Journal(tmp_path, resumed=start, log_every=1, num_steps=201, world=ALONE)
        for step, now in ((1, 100.0), (2, 159.0), (3, 161.0)):
            clock["s"] = now
            heldout = {2: 4.25}.get(step)
            update = {"step": step, "elapsed_s": float(step), "heldout_loss": heldout}
            journal.add(METRICS.model_copy(update=update), coming_s=2.0 / step)
    assert [x.getMessage() for x in caplog.records if "tokens/s" in x.getMessage()] == [
        "step 1 of 201: loss 5.000, |g| 1.50, 184 tokens/s, 1.00 GiB, about 6 min 40 s left",
        "step 3 of 201: loss 5.000, held-out 4.250, |g| 1.50, 184 tokens/s, 1.00 GiB, "
        "about 2 min 12 s left",
    ]


def journals(world, folder):
    """Keep a journal in two processes, be killed after step 5, and resume from step 3 twice, the
    first 3 steps by five processes."""
    found = {}
    for number, first in enumerate((0, 3, 3)):
        skipped = [{"step": 5, "reason": "truncated"}] if number == 2 else []
        clock = TrainingClock(1.25, 6.25) if first else TrainingClock()
        resumed = Resumed(first, skipped, None, clock)
        journal = Journal(folder, resumed=resumed, log_every=1, num_steps=STEPS, world=world)
        found[f"start {number}"] = (
            [r["step"] for r in journal.rows],
            journal.resumed_from,
            journal.clock,
        )
        found["skipped"] = journal.skipped
        for step in range(first + 1, 6):
            update = {"step": step, "elapsed_s": step / 2 + 10 * number}
            journal.add(METRICS.model_copy(update=update), coming_s=0.5)
    if world.is_main:
        journal.copy_to(folder / "copy.jsonl")
    found["end"] = journal.clock
    return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("journal")
    return folder, run_in_group(journals, folder, world_size=2)


def test_journal_continues_after_the_checkpoints_step_on_all_processes(kept):
    _, results = kept
    for found in results:
        assert found["start 0"] == ([], [], (0.0, 0.0))
        assert found["start 1"] == ([1, 2, 3], [3], (1.25, 6.25))
        assert found["start 2"] == ([1, 2, 3], [3, 3], (1.25, 6.25))
        assert found["end"] == (22.5, 6.25 + 2 * 21.25)


def test_journal_has_every_step_once_and_the_last_invocations_values(kept):
    folder, _ = kept
    rows = read_lines(folder / "metrics.jsonl")
    assert [(row["step"], row["elapsed_s"]) for row in rows] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
        (4, 22.0),
        (5, 22.5),
    ]
    assert read_lines(folder / "copy.jsonl") == rows


def test_every_start_is_in_the_history(kept):
    folder, _ = kept
    assert [row["first_step"] for row in read_lines(folder / "history.jsonl")] == [0, 3, 3]


def test_damaged_checkpoints_of_every_start_are_told_on_all_processes(kept):
    _, results = kept
    assert all(found["skipped"] == [{"step": 5, "reason": "truncated"}] for found in results)
