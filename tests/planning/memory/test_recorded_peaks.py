"""Peaks of plans by a few recordings and lines between them: which are recorded, and that what is
straight is predicted exactly."""

from dataclasses import replace

import pytest

from tests.support.preflight_examples import setup
from workflow.lib.planning.memory.peaks import Peaks, combined
from workflow.lib.planning.memory.recorded_peaks import RecordedPeaks

LAYERS, LEVELS = 16, [False, 8, 4, 3, 2, 0.625, 0.75, True]


class Straight:
    """Records peaks that are straight in all that a search varies, and what it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, plans):
        self.asked += plans
        return [straight(plan) for plan in plans]


def straight(plan):
    recomputed, rows = len(plan.layers(LAYERS).recomputed), plan.micro_batch_size
    kept = rows * (10 * recomputed + 100 * (LAYERS - recomputed))
    away = 0.9 * kept if plan.offload_activations is True else 0
    weights = (
        4000
        - 200 * plan.offload_layers
        + (500 - 20 * plan.offload_layers) * (not plan.reshard_after_forward)
        + 800 * plan.keep_decoded
    )
    workspace = rows * (300 if plan.tile_tokens else 900) + 70 * rows * plan.keep_attention
    return Peaks(
        {
            "forward": {"nf4_weights": weights, "saved_activations": round(kept - away)},
            "backward": {"nf4_weights": weights, "layer_workspace": workspace},
        },
        host_bytes=round(away) + 200 * plan.offload_layers,
    )


def lines(record, **changes):
    values = {"rows": [1, 2, 4, 8], "levels": LEVELS, "num_layers": LAYERS}
    return RecordedPeaks(setup(), record, **values | changes)


@pytest.mark.parametrize(
    ("changes", "recordings"),
    [
        ({"micro_batch_size": 8}, 2),
        ({"micro_batch_size": 8, "activation_checkpointing": 2}, 4),
        ({"activation_checkpointing": 0.625}, 2),
        ({"micro_batch_size": 4, "offload_activations": True}, 3),
        ({"reshard_after_forward": False}, 1),
        ({"reshard_after_forward": False, "micro_batch_size": 2}, 3),
        ({"offload_layers": 5, "micro_batch_size": 2}, 3),
        ({"offload_layers": 8, "reshard_after_forward": False}, 2),
        ({"keep_decoded": 3, "activation_checkpointing": False, "micro_batch_size": 4}, 3),
        ({"tile_tokens": 64, "micro_batch_size": 4, "offload_activations": True}, 3),
        ({"keep_attention": True, "activation_checkpointing": 2}, 2),
    ],
)
def test_what_is_straight_is_predicted_exactly_by_few_recordings(changes, recordings):
    record = Straight()
    plan = replace(setup(), **changes)
    assert lines(record).of(plan) == straight(plan)
    assert len(record.asked) == recordings


def test_plans_that_differ_in_nothing_else_share_their_recordings():
    record = Straight()
    found = lines(record)
    for level in LEVELS:
        for rows in (1, 2, 4, 8):
            found.of(setup(micro_batch_size=rows, activation_checkpointing=level))
    assert len(record.asked) == 4


def test_values_that_are_set_are_recorded_as_they_are():
    record = Straight()
    plan = setup(micro_batch_size=4, activation_checkpointing=3)
    assert lines(record, rows=[4], levels=[3]).of(plan) == straight(plan)
    assert record.asked == [plan]


def test_recording_of_a_plan_corrects_those_of_its_kind_alone():
    found = lines(Straight())
    more, other = setup(micro_batch_size=8), setup(activation_checkpointing=False)
    before = found.of(other)
    found.correct(setup(), combined([(straight(setup()), 1.5)]))
    assert found.of(more) == combined([(straight(more), 1.5)])
    assert found.of(other) == before
    found.correct(more, straight(more))
    assert found.of(more) == straight(more)


def test_sum_has_no_term_below_zero():
    one, two = (Peaks({"forward": {"logits": n, "inputs": 5}}) for n in (1, 3))
    assert combined([(one, 1.0), (two, -1.0)]) == Peaks({"forward": {}})


def test_process_on_a_cpu_has_its_own_memory_and_no_workspace_of_products():
    peaks = Peaks({"forward": {"inputs": 5, "cublas_workspace": 64}}, host_bytes=3)
    assert peaks.on_cpu(700) == Peaks({"forward": {"process": 700, "inputs": 5}})
