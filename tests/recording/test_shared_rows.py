"""What the recording counts for rows that processes share, beside the engine on the CPU and rows
that a process has alone."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests.recording.test_real_engine import Recorder, adapted_in_bf16, chosen, peak, recorded
from tests.support.distributed import run_in_group
from tests.support.models import quantized, tiny_llama
from tests.support.preflight_examples import SEVEN
from workflow.lib.kernels.attention import flex
from workflow.lib.planning.work import FLEX, REDUCE
from workflow.lib.training.batches import cut_rows, make_batch

ROWS, TOKENS, SHARING = 2, 256, 2
PLAN = {"processes": SHARING, "attention": "flex", "activation_checkpointing": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model whose attention takes more memory than all else, and its base."""
    folder = tmp_path_factory.mktemp("heads")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 101}
    sizes["max_position_embeddings"] = SHARING * TOKENS
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 32}
    source = tiny_llama(folder / "original", **sizes, **heads)
    return source, quantized(source, folder / "nf4")


@pytest.fixture(scope="module")
def tapes(process, folders):
    """Recordings of rows of `TOKENS` for each process, and of twice as many that two share."""
    plan = chosen(seq_len=TOKENS, **PLAN)
    shared = replace(plan, seq_len=SHARING * TOKENS, context_parallel=SHARING)
    return [recorded(process, folders[0], asked) for asked in (plan, shared)]


def measured(world, base):
    """Return the peak of a micro-batch above the weights; attention allocates what its kernel does
    on a GPU."""
    length = TOKENS * world.size
    positions = torch.arange(length).expand(ROWS, -1).numpy()
    batch = make_batch(positions % 101, positions, positions > 0, device=torch.device("cpu"))
    training = adapted_in_bf16(base, every=0, target_modules=SEVEN)
    training.peft_model.get_base_model().config._attn_implementation = "flex"

    def scores(query, key, value, first, **options):
        return flex.allocate_like_kernel(query, key, value, options["sinks"], 1.0)

    known = [*training.parameters(), *training.buffers()]
    with (
        patch.object(flex, "all_scores", scores),
        patch.object(flex, "launch", lambda *args, **options: None),
        Recorder(known) as seen,
        training.adapters.unchanged(),
    ):
        training(cut_rows(batch, world.context)).backward()
    return seen.peak


def test_exchange_of_heads_takes_the_memory_that_it_takes_on_the_engine(tapes, folders):
    """In attention's backward, where the peak is. Weights are gathered in recordings alone."""
    (alone,) = run_in_group(measured, folders[1], world_size=1)
    shared, _ = run_in_group(measured, folders[1], world_size=SHARING, context_parallel=SHARING)
    assert shared > 1.2 * alone
    assert [peak(tape) for tape in tapes] == pytest.approx([alone, shared], rel=0.04)


def test_attention_of_shared_rows_is_counted_over_whole_rows(tapes):
    """Half of the heads, over twice as many queries that see twice as many keys."""
    flops, collectives = [], []
    for tape in tapes:
        amounts = [x for phase in tape.work.phases.values() for x in phase.items()]
        flops.append(sum(x.flop for kind, x in amounts if kind.startswith(FLEX)))
        collectives.append(
            sum(x.calls for kind, x in amounts if kind.startswith(f"{REDUCE}/{SHARING}"))
        )
    assert 1.2 < flops[1] / flops[0] < 2.0  # each query also computes half a block
    assert collectives[1] - collectives[0] == 2 * 2 * 4  # layers; passes; query, key, value, output
