"""What a recorded step counts, by hand."""

from dataclasses import replace

import numpy as np
import pytest
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from tests.support.preflight_examples import llama_config, setup
from workflow.lib.kernels.attention.answer_rows import grouped
from workflow.lib.planning import work as kinds
from workflow.lib.recording.engine_run import _masks_of_rows

LAYERS, HIDDEN, WIDE = 3, 256, 640
CONFIG = llama_config(HIDDEN, WIDE, LAYERS, 4, 2, 320)
WEIGHTS = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * WIDE  # of a layer
DOWN = HIDDEN * WIDE
OUT_AND_IN = 2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + HIDDEN // 2) + 3 * (HIDDEN + WIDE)
PLAN = setup(processes=1, seq_len=128, rank=8, fused_layers=True, activation_checkpointing=False)
TOKENS = 128


def counted(process, plan):
    return process.record(CONFIG, plan, checked=False).work


@pytest.fixture(scope="module")
def plain(process):
    """The work of `PLAN`."""
    return counted(process, PLAN)


def total(work, phase, kind, field="flop"):
    return sum(
        getattr(amount, field)
        for name, amount in work.phases[phase].items()
        if name.partition("@")[0] == kind
    )


def test_forward_multiplies_each_frozen_weight_with_each_token_once(plain):
    """A kernel that moves more than it multiplies adds some adapters' results."""
    found = total(plain, "forward", kinds.MATMUL) / (2 * TOKENS * LAYERS)
    assert WEIGHTS < found <= WEIGHTS + 8 * OUT_AND_IN


def test_backward_multiplies_adapters_twice_as_often_as_frozen_weights(plain):
    found = total(plain, "backward", kinds.MATMUL)
    adapters = 2 * TOKENS * LAYERS * 2 * 8 * OUT_AND_IN
    first = 2 * TOKENS * (2 * HIDDEN * HIDDEN // 2 + HIDDEN * HIDDEN)  # no gradient of embeddings
    assert found == pytest.approx(2 * TOKENS * LAYERS * WEIGHTS + adapters, abs=1.5 * first)


def test_recomputation_adds_a_forward_without_the_last_matmul(process):
    kept, again = (
        total(counted(process, replace(PLAN, activation_checkpointing=x)), "backward", kinds.MATMUL)
        for x in (False, True)
    )
    assert again - kept >= 2 * TOKENS * LAYERS * (WEIGHTS - DOWN)
    assert again - kept <= 2 * TOKENS * LAYERS * (WEIGHTS + 8 * OUT_AND_IN)


def test_attention_counts_whole_blocks_of_keys_and_backward_as_much_again_and_half(plain):
    forward = 2 * 2 * TOKENS * HIDDEN * (TOKENS + 128) / 2 * LAYERS
    assert total(plain, "forward", kinds.EQUAL) == forward
    assert total(plain, "backward", kinds.EQUAL) == 2.5 * forward


@pytest.mark.parametrize("graphs", [False, True])
def test_attention_of_packed_documents_counts_their_own_keys(process, graphs):
    """A graph's kernels are told of the longest document that any micro-batch may have."""
    plan = replace(PLAN, seq_len=2048, cuda_graphs=graphs)
    whole = total(counted(process, plan), "forward", kinds.EQUAL)
    packed = counted(process, replace(plan, documents_per_row=16.0))
    found = total(packed, "forward", kinds.SHORT) + total(packed, "forward", kinds.EQUAL)
    assert found / whole == pytest.approx((128 + 128) / (2048 + 128))  # with half a block an edge


@pytest.mark.parametrize(
    ("attention", "kind", "backward"),
    [("varlen", kinds.SHORT, 3.5), ("flash_attention_2", kinds.ATTENTION, 2.5)],
)
@pytest.mark.parametrize("graphs", [False, True])
def test_attention_counts_documents_of_unequal_lengths_by_their_squares(
    process, graphs, attention, kind, backward
):
    """Kernels of the project compute the scores once more in backward than FlashAttention."""
    plan = replace(PLAN, seq_len=2048, cuda_graphs=graphs, documents_per_row=9.0)
    plan, lengths = replace(plan, attention=attention), np.array([1024, *[128] * 8])
    work = counted(process, replace(plan, document_lengths=grouped([lengths])))
    keys = (lengths * (lengths + 128)).sum() / 2 / lengths.sum()
    forward = 2 * 2 * 2048 * HIDDEN * keys * LAYERS
    assert total(work, "forward", kind) == pytest.approx(forward)
    assert total(work, "backward", kind) == pytest.approx(backward * forward)
    assert total(work, "forward", kinds.EQUAL) == 0


def test_wide_heads_of_short_documents_have_a_rate_of_their_own(process):
    config = CONFIG | {"head_dim": 320}
    plan = replace(PLAN, seq_len=2048, documents_per_row=9.0, cuda_graphs=True)
    work = process.record(config, plan, checked=False).work
    assert total(work, "forward", kinds.WIDE) > 0
    assert total(work, "forward", kinds.SHORT) == 0


def test_decoding_reads_half_a_byte_and_writes_two_for_each_weight(plain):
    moved = total(plain, "forward", kinds.DECODE, "bytes")
    assert moved == pytest.approx(2.5 * LAYERS * WEIGHTS)


def test_work_of_two_processes_has_their_collectives(process):
    work = counted(process, replace(PLAN, processes=2))
    gathered = f"{kinds.GATHER}/2/1{kinds.BESIDE}"
    assert work.phases["forward"][gathered].bytes > LAYERS * WEIGHTS / 2 * 0.5
    assert any(name.startswith(kinds.REDUCE) for name in work.phases["backward"])


def test_update_moves_what_the_optimizer_keeps(plain):
    trained = LAYERS * 8 * OUT_AND_IN
    assert total(plain, kinds.UPDATE, kinds.MEMORY, "bytes") >= 16 * trained


def test_masks_of_a_recording_end_with_it():
    with _masks_of_rows(packed=True):
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_mask
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask


@pytest.mark.parametrize(
    ("documents", "kind", "other"),
    [(1.0, kinds.EQUAL, kinds.MASKED), (2.0, kinds.MASKED, kinds.EQUAL)],
)
def test_rows_of_one_document_take_no_mask_by_sdpa(process, documents, kind, other):
    """Transformers makes one for every row of tensors without values."""
    plan = replace(PLAN, attention="sdpa", fused_layers=False, documents_per_row=documents)
    work = counted(process, plan)
    for phase in ("forward", "backward"):
        assert total(work, phase, kind, "calls") == LAYERS
        assert total(work, phase, other, "calls") == 0
