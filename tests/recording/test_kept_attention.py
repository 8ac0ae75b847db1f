"""What recordings count where recomputed layers keep attention's results."""

from dataclasses import replace

import pytest

from tests.recording.test_real_engine import chosen, peak, recorded
from tests.support.models import tiny_llama
from workflow.lib.kernels.attention.attention_choice import VARLEN
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.work import ATTENTION, EQUAL

LAYERS, TOKENS, HEADS, WIDTH = 4, 4096, 8, 32
RESULT_BYTES = TOKENS * HEADS * (2 * WIDTH + 4)  # outputs in 16 bits, sums in fp32
PASSES = {False: 1 + 1 + 2.5, True: 1 + 2.5}  # forward, once more, backward
PLAN = chosen(seq_len=TOKENS, attention=VARLEN, micro_batch_size=1)
OFFLOADED = {"offload_activations": True, "offload_window_bytes": 2**20}


@pytest.fixture(scope="module")
def tapes(process, tmp_path_factory):
    """Recordings of a row, of which attention takes most time, by what is offloaded and kept."""
    source = tiny_llama(
        tmp_path_factory.mktemp("heads") / "original", hidden_size=64, intermediate_size=64,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        head_dim=WIDTH, vocab_size=101, max_position_embeddings=TOKENS,
    )  # fmt: skip
    plans = {"here": PLAN, "offloaded": replace(PLAN, **OFFLOADED)}
    return {
        where: [recorded(process, source, replace(plan, keep_attention=x)) for x in PASSES]
        for where, plan in plans.items()
    }


def attention_flop(tape):
    amounts = [x for phase in tape.work.phases.values() for x in phase.items()]
    return sum(x.flop for kind, x in amounts if kind.startswith((ATTENTION, EQUAL)))


@pytest.mark.parametrize("where", ["here", "offloaded"])
def test_attention_is_counted_once_less(tapes, where):
    again, kept = map(attention_flop, tapes[where])
    assert kept / again == pytest.approx(PASSES[True] / PASSES[False], rel=0.02)


def test_results_of_all_layers_but_the_one_at_work_are_counted(tapes):
    again, kept = map(peak, tapes["here"])
    assert kept - again == pytest.approx((LAYERS - 1) * RESULT_BYTES, rel=0.05)


def test_results_are_in_host_memory_where_activations_are(tapes):
    again, kept = tapes["offloaded"]
    assert peak(kept) < peak(again) + RESULT_BYTES / 2
    host = [replay(tape).peaks.host_bytes for tape in (again, kept)]
    assert host[1] - host[0] >= LAYERS * RESULT_BYTES
