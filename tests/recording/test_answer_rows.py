"""A plan of pairs or groups beside recordings of its rows, one by one."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.support.preflight_examples import llama_config, setup
from workflow.benchmark.random_groups import group_rows
from workflow.benchmark.random_pairs import pair_rows, random_pairs
from workflow.lib.data.tokens.group_rows import Answer, Group
from workflow.lib.kernels.attention.answer_rows import answer_rows, padded_length
from workflow.lib.planning.memory.allocation_tape import STEPS
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.timing.machine_speed import fabric_of
from workflow.lib.planning.timing.rates import rates_of
from workflow.lib.planning.timing.step_time import COMPUTING, Clock
from workflow.lib.recording import engine_run
from workflow.lib.recording.recorded_batches import RecordedBatches
from workflow.lib.settings.objectives import PAIRED
from workflow.lib.system.gpu_models import BY_NAME
from workflow.lib.training.batches import shared_lengths, stored_batch

CONFIG = llama_config(2560, 9728, 3, 32, 8, 32000)
SEQ_LEN = 4096


def groups(count):
    """Groups of 4 answers, of drawn lengths, to prompts of drawn lengths."""
    draw = np.random.default_rng(0)

    def ids(most):
        return draw.integers(0, 97, draw.integers(most // 4, most)).tolist()

    def answer():
        tokens = ids(SEQ_LEN // 12)
        return Answer(tokens, [-1.0] * len(tokens), draw.normal())

    return [
        Group(ids(SEQ_LEN // 6), [answer() for _ in range(4)], "drawn", row) for row in range(count)
    ]


STORES = {
    "dpo": lambda: pair_rows(random_pairs(40, seq_len=SEQ_LEN, vocab_size=97), seq_len=SEQ_LEN),
    "grpo": lambda: group_rows(groups(7), seq_len=SEQ_LEN),
}


def plan_of(objective, store, **changes):
    arrays = store.input_ids, store.position_ids, store.loss_mask
    return setup(
        processes=1, seq_len=SEQ_LEN, objective=objective, fused_layers=True, shares_prompts=True,
        start_reference=True, answer_rows=answer_rows(*arrays, paired=store.examples in PAIRED),
        **changes,
    )  # fmt: skip


def recorded_row(objective, row, changes):
    """Record a training row alone."""
    store = STORES[objective]()
    rows = np.array([row])
    length = padded_length(int(shared_lengths(store, rows)[0]), seq_len=SEQ_LEN)
    batch = stored_batch(store, rows, row_tokens=length)
    batch = replace(batch, row_keys=torch.zeros(1, dtype=torch.int64), step_sizes=torch.ones(3))
    own = answer_rows(
        *(x[rows] for x in (store.input_ids, store.position_ids, store.loss_mask)),
        paired=store.examples in PAIRED,
    )

    class StoredBatches(RecordedBatches):
        num_steps = property(lambda self: STEPS, lambda self, _: None)

        def _batch_of(self, step):
            return batch.each(lambda x: torch.zeros(x.shape, dtype=x.dtype))

    plan = replace(plan_of(objective, store, **changes), answer_rows=own)
    with patch.object(engine_run, "RecordedBatches", StoredBatches):
        return engine_run.record(CONFIG, plan)


def seconds(tape, plan):
    """What a GPU computes; graphs also copy their inputs, which a mean row has not."""
    gpu = BY_NAME["NVIDIA H200"]
    clock = Clock(gpu, fabric_of(gpu, gpus_per_node=1), rates_of(gpu))
    parts = clock.parts(tape.work, plan, num_layers=3, trained_share=1.0)
    return sum(parts[name] for name in COMPUTING)


def amounts(tape):
    every = [x for phase in tape.work.phases.values() for x in phase.values()]
    return [sum(getattr(x, field) for x in every) for field in ("flop", "bytes")]


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": True, "accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("objective", STORES)
def test_plan_has_the_peak_of_the_largest_row_and_the_work_of_the_mean_row(
    process, objective, changes
):
    store = STORES[objective]()
    plan = plan_of(objective, store, **changes)
    tape = process.record(CONFIG, plan)
    rows = [
        process._executor.submit(recorded_row, objective, row, changes).result()
        for row in range(store.num_rows)
    ]
    peaks = [replay(row).peaks.allocated_bytes for row in rows]
    # The row with most keys may be another than that with most trained tokens.
    assert 0.999 <= replay(tape).peaks.allocated_bytes / max(peaks) < 1.025
    flop, moved = amounts(tape)
    mean_flop, mean_moved = np.mean([amounts(row) for row in rows], axis=0)
    assert flop == pytest.approx(mean_flop, rel=0.002)
    assert moved == pytest.approx(mean_moved, rel=0.03)  # each chunk of the loss reads the head
    mean_s = np.mean([seconds(row, plan) for row in rows])
    assert seconds(tape, plan) == pytest.approx(mean_s, rel=0.01)
