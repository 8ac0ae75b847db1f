"""Every supported model family: loss and adapter gradients of packed rows equal those of stock packages, document by document."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models import VOCAB, adapted, quantized, random_store
from workflow.lib.batches import make_batch
from workflow.lib.families import FAMILIES
from workflow.lib.fused import fuse_layers_
from workflow.lib.inference import load_base
from workflow.lib.lora import trainable_parameters
from workflow.lib.parallel import checkpoint_activations_
from workflow.lib.stash import Stash
from workflow.lib.tokens import TokenStore

ROWS, SEQ_LEN = 3, 29
CPU = torch.device("cpu")
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
# Family, and what it has that others have not. Windows are shorter than rows, and than some documents.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {"num_key_value_heads": 4}),
    "llama 3, scaled positions": ("llama", {"rope_parameters": LLAMA_3}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "qwen 2, biases of q, k, v": ("qwen2", {}),
    "qwen 2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen 3, norms of q and k": ("qwen3", {}),
    "gemma 2, two softcaps, window, tied": (
        "gemma2",
        {"query_pre_attn_scalar": 16, "sliding_window": 5, "final_logit_softcapping": 3.0},
    ),
    "gemma 3, two rotary tables, window": (
        "gemma3_text",
        {"query_pre_attn_scalar": 16, "sliding_window": 5},
    ),
    "phi 3, fused linears": ("phi3", {}),
    "olmo 2, norms behind": ("olmo2", {}),
}


# Fused modules of a model of 3 layers; Gemma's norms multiply by 1 + w, Phi's feed-forward is one linear.
PLAIN = {"norms": 6, "feed_forwards": 3}
FUSED = {
    "llama": PLAIN, "mistral": PLAIN, "qwen2": PLAIN, "qwen3": {"norms": 12, "feed_forwards": 3},
    "gemma2": {"feed_forwards": 3}, "gemma3_text": {"feed_forwards": 3}, "phi3": {"norms": 6},
    "olmo2": {"norms": 12, "feed_forwards": 3},
}  # fmt: skip


def base_of(case: str, folder: Path) -> Path:
    """Save and quantize a random model, its norms and biases off their initial values."""
    family, special = CASES[case]
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 128,
        "initializer_range": 0.2, "pad_token_id": 0,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **(sizes | special))
    ).float()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder / "original")
    return quantized(folder / "original", folder / "nf4")


def ours(base: Path, store: TokenStore, attention: str, *, fused: bool = False) -> dict[str, Any]:
    """Loss and gradients of all rows in one forward of the training module, every second layer recomputed."""
    training = adapted(base, attention=attention, r=4, alpha=8).train()
    model = training.peft_model.get_base_model()  # type: ignore[operator]
    if fused:
        replaced = fuse_layers_(model)
        assert replaced == FUSED[model.config.model_type]
        training.stash = Stash(CPU, window_bytes=4096)
    checkpoint_activations_(model, every=2)
    params = trainable_parameters(training)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in params.values():
            param.copy_(0.1 * torch.randn(param.shape, generator=generator))
    batch = make_batch(
        store.input_ids.astype("int64"), store.position_ids.astype("int64"), store.loss_mask.copy(), device=CPU
    )  # fmt: skip
    loss = training(
        batch.input_ids, batch.position_ids, batch.positions, batch.targets, batch.bounds
    )
    loss.backward()
    return {
        "loss": loss.detach(),
        "values": {name: p.detach() for name, p in params.items()},
        "gradients": {name: p.grad for name, p in params.items()},
    }


def stock(
    base: Path, store: TokenStore, attention: str, values: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """The same by stock Transformers, bitsandbytes and PEFT, every document in a forward of its own."""
    model: Any = load_base(base, device=CPU, compute_dtype=torch.float32, attention=attention)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config).train()
    params = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    assert params.keys() == values.keys()
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(values[name])
    total = torch.zeros(())
    for row in range(ROWS):
        edges = [*(store.position_ids[row] == 0).nonzero()[0], SEQ_LEN]
        for start, stop in itertools.pairwise(edges):
            ids = torch.from_numpy(store.input_ids[row, start:stop].astype("int64"))
            mask = torch.from_numpy(store.loss_mask[row, start:stop].copy())
            if mask.any():
                logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
                total = total + torch.nn.functional.cross_entropy(
                    logits[:-1][mask[1:]], ids[1:][mask[1:]], reduction="sum"
                )
    total.backward()
    return {"loss": total.detach(), "gradients": {name: p.grad for name, p in params.items()}}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_stock_packages(tmp_path: Path, case: str) -> None:
    attention = "eager" if "softcaps" in case else "sdpa"
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    assert max(store.position_ids.max(axis=1)) > 10, "a document longer than the windows"
    base = base_of(case, tmp_path)
    found = ours(base, store, attention)
    expected = stock(base, store, attention, found["values"])
    assert_equal(found, expected)
    assert_equal(ours(base, store, attention, fused=True), expected)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-5, atol=0)
    for name, gradient in expected["gradients"].items():
        # fp32, sums in another order: rows of documents here, documents there
        largest = float(gradient.abs().max())
        torch.testing.assert_close(
            found["gradients"][name], gradient, rtol=1e-3, atol=1e-5 * largest, msg=lambda m, n=name: f"{n}: {m}"
        )  # fmt: skip
        assert largest > 0, name


def test_every_supported_family_has_a_case() -> None:
    assert {family for family, _ in CASES.values()} == set(FAMILIES)
