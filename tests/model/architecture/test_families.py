"""Attention, rounding and levers of memory where families differ: loss and adapter gradients of
packed rows equal those of stock packages, document by document. `tests/training/test_families.py`
has each family once.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.built_models import built_model
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.gathering import all_full
from tests.support.models import VOCAB, adapted, quantized, random_store
from tests.support.plans import make_plan
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.world import process_group
from workflow.lib.export.stock_models import load_base
from workflow.lib.kernels.attention import packed as packed_attention
from workflow.lib.model.activation_offload import ActivationOffload
from workflow.lib.model.decoder_layers import decoder_layers
from workflow.lib.model.fusion.fuse_layers import fuse_layers_
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.nf4_model import local, local_range
from workflow.lib.model.recomputation import checkpoint_activations_
from workflow.lib.model.rounded_activations import RoundedActivations
from workflow.lib.settings.config import LoraSettings, RunConfig
from workflow.lib.training.batches import make_batch
from workflow.lib.training.startup_checks import check_family

ROWS, SEQ_LEN = 3, 29
CPU = torch.device("cpu")
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.5] * 8,
    "long_factor": [4.0] * 8,
}
# Family, and what it has that the table of families has not, or not with these levers. Windows are
# shorter than rows, and than some documents.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {"num_key_value_heads": 4}),
    "llama 3, scaled positions": ("llama", {"rope_parameters": LLAMA_3}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "gemma 2, two softcaps, window, tied": (
        "gemma2",
        {"query_pre_attn_scalar": 16, "sliding_window": 5, "final_logit_softcapping": 3.0},
    ),
    "gemma 3, two rotary tables, window": (
        "gemma3_text",
        {"query_pre_attn_scalar": 16, "sliding_window": 5},
    ),
    "phi 3, short factors of LongRoPE": (
        "phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 29},
    ),
}


# Fused modules of a model of 2 layers; Gemma has four norms a layer, with 1 + w, and Gemma 3 two
# more of heads.
PLAIN = {"norms": 4, "projections": 2, "rotations": 2, "feed_forwards": 2}
FUSED = {
    "llama": PLAIN,
    "gemma2": PLAIN | {"norms": 8},
    "gemma3_text": PLAIN | {"norms": 12},
    "phi3": {"norms": 4, "attentions": 2, "feed_forwards": 2},
}


def base_of(case: str, folder: Path) -> Path:
    """Save and quantize a random model, its norms and biases off their initial values."""
    family, special = CASES[case]
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
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
    """Loss and gradients of all rows in one forward of the training module, every second layer
    recomputed.
    """
    training = adapted(base, attention=attention, r=4, alpha=8).train()
    model = training.peft_model.get_base_model()  # type: ignore[operator]
    if fused:
        replaced = fuse_layers_(model)
        assert replaced == FUSED[model.config.model_type]
        training.activation_offload = ActivationOffload(CPU, window_bytes=4096)
    checkpoint_activations_(model, range(0, len(decoder_layers(model)), 2))
    return trained(training, store)


def kept_in_float8(base: Path, store: TokenStore, attention: str) -> dict[str, Any]:
    """The same with fused layers where there are some, none recomputed, and what they save in
    float8 on the host.
    """
    training = adapted(base, attention=attention, r=4, alpha=8).train()
    model = training.peft_model.get_base_model()  # type: ignore[operator]
    fuse_layers_(model)
    stash = ActivationOffload(CPU, window_bytes=4096)
    training.rounded_activations = RoundedActivations(torch.float32, stash)
    training.rounded_activations.follow_(decoder_layers(model))
    result = trained(training, store)
    assert stash.host_bytes > 0
    return result


def trained(training: Any, store: TokenStore) -> dict[str, Any]:
    """Loss and gradients, sharded as they are, of a store's rows with an adapter whose values do
    not depend on how it is sharded.
    """
    params = trainable_parameters(training)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in params.values():
            start, stop = local_range(param)
            local(param).copy_((0.1 * torch.randn(param.shape, generator=generator))[start:stop])
    batch = make_batch(
        store.input_ids.astype("int64"),
        store.position_ids.astype("int64"),
        store.loss_mask.copy(),
        device=CPU,
    )
    loss = training(batch)
    loss.backward()
    return {
        "loss": loss.detach(),
        "values": {name: local(p.detach()) for name, p in params.items()},
        "gradients": {name: p.grad for name, p in params.items()},
    }


def sharded(bases: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """The same by the model of a run over two processes; embeddings sliced and on the host in
    turn.
    """
    results = {}
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        for number, (case, base) in enumerate(bases.items()):
            plan = make_plan(
                activation_checkpointing=2,
                offload_embedding=number % 2 == 0,
                offload_activations=number % 2 == 1,
                offload_window_bytes=(None, 4096)[number % 2],
                offload_layers=number % 3,
            )
            config = RunConfig(lora=LoraSettings(r=4, alpha=8))
            model = built_model(
                base, config, plan, world, dtype=torch.float32, attention=attention_of(case)
            )
            result = trained(model.training.train(), two_rows(world.rank))
            check_family(model.training, random_store(rows=ROWS, seq_len=SEQ_LEN), world)
            dist.all_reduce(result["loss"])
            results[case] = {"loss": result["loss"], "gradients": all_full(result["gradients"])}
    return results


def two_rows(rank: int) -> TokenStore:
    """Rows 0 and 1 for the first process; row 2, and once more without a trained token, for the
    second.
    """
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    rows = [[0, 1], [2, 2]][rank]
    arrays = {
        f"train.{name}.npy": getattr(store, name)[rows]
        for name in ("input_ids", "loss_mask", "position_ids")
    }
    arrays["train.loss_mask.npy"][1] &= rank == 0
    heldout = {f"heldout.{name}.npy": np.zeros(1) for name in ("input_ids", "loss_mask")}
    return TokenStore(
        manifest=store.manifest, arrays=arrays | heldout | {"heldout.offsets.npy": np.array([0, 1])}
    )


def attention_of(case: str) -> str:
    return "eager" if "softcaps" in case else "sdpa"


def stock(
    base: Path, store: TokenStore, attention: str, values: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """The same by stock Transformers, bitsandbytes and PEFT, every document in a forward of its
    own.
    """
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


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {case: base_of(case, folder / str(number)) for number, case in enumerate(CASES)}


@pytest.fixture(scope="module")
def single(bases: dict[str, Path]) -> dict[str, dict[str, Any]]:
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    return {case: ours(base, store, attention_of(case)) for case, base in bases.items()}


@pytest.fixture(scope="module")
def reference(
    bases: dict[str, Path], single: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    assert max(store.position_ids.max(axis=1)) > 10, "a document longer than the windows"
    return {
        case: stock(base, store, attention_of(case), single[case]["values"])
        for case, base in bases.items()
    }


@pytest.fixture(scope="module")
def shared(bases: dict[str, Path]) -> list[dict[str, dict[str, Any]]]:
    return run_distributed(sharded, bases, world_size=2)


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(result["loss"], expected["loss"], rtol=1e-5, atol=0)
    assert result["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        # fp32, sums in another order: rows of documents here, documents there
        largest = float(gradient.abs().max())
        torch.testing.assert_close(
            result["gradients"][name],
            gradient,
            rtol=1e-3,
            atol=1e-5 * largest,
            msg=lambda m, n=name: f"{n}: {m}",
        )
        assert largest > 0, name


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_stock_packages(
    single: dict[str, dict[str, Any]], reference: dict[str, dict[str, Any]], case: str
) -> None:
    assert_same(single[case], reference[case])


@pytest.mark.parametrize("case", CASES)
def test_activations_in_float8_turn_gradients_little(
    bases: dict[str, Path], single: dict[str, dict[str, Any]], case: str
) -> None:
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    rounded = kept_in_float8(bases[case], store, attention_of(case))
    torch.testing.assert_close(rounded["loss"], single[case]["loss"], rtol=1e-6, atol=0)
    one, other = (
        torch.cat([x["gradients"][name].flatten() for name in single[case]["gradients"]])
        for x in (rounded, single[case])
    )
    cosine = torch.cosine_similarity(one, other, dim=0)
    assert 0.99 < cosine < 0.99999


@pytest.mark.parametrize("case", [case for case in CASES if "window" in case])
def test_documents_stay_apart_in_eager_attention_with_windows_too(
    bases: dict[str, Path], reference: dict[str, dict[str, Any]], case: str
) -> None:
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    assert_same(ours(bases[case], store, "eager"), reference[case])


def plain_varlen_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    *_: Any,
    scale: float,
    window_size: tuple[int, int],
    **__: Any,
) -> torch.Tensor:
    """What torch's kernel does on a GPU: (tokens, heads, head_dim), document by document,
    `window_size[0]` tokens back.
    """
    outputs = []
    for start, stop in itertools.pairwise(bounds.tolist()):
        heads = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        back = window_size[0] if window_size[0] >= 0 else stop
        seen = torch.ones(stop - start, stop - start, dtype=torch.bool).tril().triu(-back)
        output = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=seen, scale=scale, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("case", [case for case in CASES if "softcap" not in case])
def test_varlen_is_told_all_that_a_family_asks_of_its_attention(
    bases: dict[str, Path],
    reference: dict[str, dict[str, Any]],
    case: str,
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel is for GPUs, so its definition takes its place; an argument that it does not know
    would raise.
    """
    monkeypatch.setattr(packed_attention, "varlen_attn", plain_varlen_attn)
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    assert_same(ours(bases[case], store, "varlen", fused=fused), reference[case])


@pytest.mark.parametrize("case", CASES)
def test_fused_layers_and_offloaded_activations_change_neither(
    bases: dict[str, Path], reference: dict[str, dict[str, Any]], case: str
) -> None:
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    result = ours(bases[case], store, attention_of(case), fused=True)
    assert_same(result, reference[case])


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_of_two_processes_are_those_of_stock_packages(
    shared: list[dict[str, dict[str, Any]]], reference: dict[str, dict[str, Any]], case: str
) -> None:
    """With embedding and head in slices of 106 and 105 rows."""
    for process in shared:
        assert_same(process[case], reference[case])
