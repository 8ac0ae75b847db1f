"""Documents that share their prompt have the hidden states and gradients of whole documents: stock
layers in float64, by family."""

import numpy as np
import pytest
import torch

from tests.support.families import FAMILIES, RECURRENT, by_kind, tiny_family
from tests.support.scored_rows import PROMPTED, prompted_rows
from workflow.lib.checkpoints.meta_model import auto_class
from workflow.lib.model.layers.adapter_dropout import AdapterState
from workflow.lib.model.prepared_decoder import PreparedDecoder
from workflow.lib.training.batches import shared_lengths, stored_batch

ATTENTION = {"gemma2": "eager", "gpt_oss": "eager"}
# Families compute norms and rotary tables in fp32, whatever the dtype.
TOLERANCE = 1e3 * torch.finfo(torch.float32).eps
KINDS = (
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v3",
)


def batches(store):
    """Return the same rows whole, and with shared prompts."""
    rows = np.arange(store.num_rows)
    longest = int(shared_lengths(store, rows).max())
    return stored_batch(store, rows), stored_batch(store, rows, row_tokens=longest)


def test_prompts_are_computed_once():
    whole, short = batches(prompted_rows("pairs"))
    saved = [sum(max(0, p - 1) for p, *_ in of_row) for of_row in PROMPTED]
    used = [sum(2 * p + c + r + 2 for p, c, r in of_row) for of_row in PROMPTED]
    left = [before - less for before, less in zip(used, saved, strict=True)]
    assert short.input_ids.shape[1] == max(left)
    assert torch.equal(short.targets, whole.targets)
    assert len(short.firsts) == len(whole.firsts)


@pytest.mark.parametrize("family", by_kind(sorted({*FAMILIES} - {*RECURRENT}), KINDS))
def test_hidden_states_and_gradients_are_those_of_whole_documents(tmp_path, family):
    folder = tiny_family(family, tmp_path)
    found = []
    for batch in batches(prompted_rows("pairs")):
        model = stock_model(folder, ATTENTION.get(family, "sdpa"))
        prepared = PreparedDecoder(model, AdapterState())
        if obstacle := prepared.sharing_obstacle():
            pytest.skip(obstacle)
        inputs = prepared.inputs(batch.input_ids, batch.position_ids, shared=batch.shared)
        hidden = model.get_decoder()(**inputs).last_hidden_state.flatten(0, 1)[batch.positions]
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).double()
        (hidden * weights).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((hidden.detach(), grads))
    (whole, grads), (shared, shared_grads) = found
    assert off(shared, whole) < TOLERANCE
    assert grads.keys() == shared_grads.keys()
    assert max(off(shared_grads[name], gradient) for name, gradient in grads.items()) < TOLERANCE


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


def stock_model(folder, attention):
    from transformers import AutoConfig

    kind = auto_class(AutoConfig.from_pretrained(folder))
    return kind.from_pretrained(
        folder, dtype=torch.float64, attn_implementation=attention, experts_implementation="eager"
    ).eval()
