"""Building and loading models: every kind of family gives the stock model's logits; what cannot is
refused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.support.families import tiny_family
from tests.support.models import VOCAB, adapted, quantized, tiny_llama
from workflow.lib.export.stock_models import load_base
from workflow.lib.model.layers.nf4_linear import NF4Linear, nf4_linears
from workflow.lib.model.nf4_model import (
    build_nf4_on_meta,
    build_on_meta,
    load_weights_,
    materialize_,
)
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.system.errors import UserError

CPU = torch.device("cpu")
SEQ_LEN = 17
# What each family has that others have not.
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 7},
    "qwen2": {},  # biases of q, k and v
    "qwen3": {"head_dim": 16},  # norms of q and k
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7},  # two softcaps
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
    },  # two rotary tables, scaled embedding
    "gemma4_text": {"head_dim": 16},  # a buffer that the checkpoint stores
    "apertus": {},  # an activation with parameters and buffers
    "olmo2": {},  # norms after attention
    "phi3": {},  # fused linears
    "phi": {},  # biases everywhere, the head's too
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "opt": {},  # learned positions, no rotary table
}


def tiny(family: str, folder: Path) -> Path:
    """Save a random model of a family, its norms and biases off their initial values, to
    `folder`.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        hidden_size=80,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        initializer_range=0.2,
        pad_token_id=0,
        **FAMILIES[family],
    )
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for tensor in (*model.parameters(), *stored_scalars(model)):
            if tensor.dim() <= 1 and tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return folder


def stored_scalars(model: PreTrainedModel) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_kind_of_family_are_those_of_the_stock_model(
    tmp_path: Path, family: str
) -> None:
    base = quantized(tiny(family, tmp_path / "original"), tmp_path / "nf4")
    attention = "eager" if family == "gemma2" else "sdpa"
    stock = load_base(base, device=CPU, compute_dtype=torch.float32, attention=attention)
    ids = torch.randint(1, VOCAB, (1, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    theirs = stock(input_ids=ids).logits[0]
    places = torch.arange(SEQ_LEN)
    training = adapted(base, attention=attention, r=2).eval()
    ours = training.logits(ids, places[None], places)
    # the same products in the same order, but for the scale of the logits: fp32 rounding
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    torch.testing.assert_close(
        training.family_logits(ids, places[None]), theirs, rtol=1e-5, atol=1e-5
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    quantized(tiny_llama(folder / "original", rope_parameters=rope), folder / "nf4")
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> PreTrainedModel:
    model = build_nf4_on_meta(folder / "nf4", compute_dtype=torch.float32, attention="sdpa")
    materialize_(model, transformers_model=model, device=CPU)
    load_weights_(model, folder / "nf4")
    return model


def test_building_takes_no_memory(folder: Path) -> None:
    model = build_nf4_on_meta(folder / "nf4", compute_dtype=torch.bfloat16, attention="sdpa")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}


def test_every_linear_but_the_head_is_nf4_and_nothing_is_trainable(loaded: PreTrainedModel) -> None:
    linears = dict(nf4_linears(loaded))
    assert len(linears) == 3 * 7
    assert not isinstance(loaded.lm_head, NF4Linear)
    assert not any(p.requires_grad for p in loaded.parameters())


def test_rotary_table_is_that_of_a_normally_built_model(
    folder: Path, loaded: PreTrainedModel
) -> None:
    """It is in no checkpoint; scaled as Llama 3.1 does, so that a default table would show."""
    config = LlamaConfig.from_pretrained(folder / "original")
    normal = LlamaForCausalLM(config).model.rotary_emb
    assert torch.equal(loaded.model.rotary_emb.inv_freq, normal.inv_freq)
    plain = 1 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    assert not torch.allclose(normal.inv_freq, plain)


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    base = quantized(tiny_llama(tmp_path / "original", tied=True), tmp_path / "nf4")
    training = adapted(base)
    model = training.peft_model.get_base_model()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(
        model.get_input_embeddings().weight,
        load_file(tmp_path / "original" / "model.safetensors")["model.embed_tokens.weight"],
    )


def test_bytes_read_are_those_of_the_checkpoint_without_code_tables(
    folder: Path, loaded: PreTrainedModel
) -> None:
    stored = {}
    for file in (folder / "nf4").glob("*.safetensors"):
        stored |= load_file(file)
    data = [
        t.nbytes
        for name, t in stored.items()
        if "quant_map" not in name and "quant_state" not in name
    ]
    assert load_weights_(loaded, folder / "nf4") == sum(data)


class OddRotary(torch.nn.Module):
    """Holds a table of its own, integer or float, that no family computes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, dtype=dtype, device="meta"), persistent=False)
        self.register_buffer("nothing", None, persistent=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_buffer_that_nobody_computes_is_refused(folder: Path, dtype: torch.dtype) -> None:
    """It would hold whatever was in memory."""
    model = build_nf4_on_meta(folder / "nf4", compute_dtype=torch.float32, attention="sdpa")
    model.model.odd = OddRotary(dtype)
    with pytest.raises(UserError) as caught:
        materialize_(model, transformers_model=model, device=CPU)
    assert str(caught.value) == (
        "LlamaForCausalLM is not supported: its buffer table of OddRotary cannot be computed "
        "without a "
        "checkpoint. Choose another model.source."
    )


def test_stored_buffer_that_the_checkpoint_lacks_is_refused(folder: Path) -> None:
    model = build_nf4_on_meta(folder / "nf4", compute_dtype=torch.float32, attention="sdpa")
    model.model.register_buffer("layer_scalar", torch.ones(1, device="meta"))
    materialize_(model, transformers_model=model, device=CPU)
    with pytest.raises(UserError, match=r"has no tensor 'model\.layer_scalar'"):
        load_weights_(model, folder / "nf4")


def test_checkpoint_that_lacks_a_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "nf4"
    broken.mkdir()
    tensors = {}
    for file in (folder / "nf4").glob("*.safetensors"):
        tensors |= load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors")
    (broken / "config.json").write_bytes((folder / "nf4" / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"has no tensor 'model\.norm\.weight'.*have it made again"):
        adapted(broken)


def test_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "wide", intermediate_size=96)
    for file in (folder / "nf4").iterdir():
        if file.name != "config.json":
            (tmp_path / "wide" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "wide" / "model.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        build_nf4_on_meta(tmp_path / "wide", compute_dtype=torch.float32, attention="sdpa")
    assert "has a quantized weight model.layers.0.mlp.down_proj of shape (80, 176)" in str(
        caught.value
    )
    assert "Delete its folder below results/base" in str(caught.value)


@pytest.mark.parametrize(
    "text", ['{"model_type": "no_such_model"}', "{}", "{", '{"model_type": "vit"}'], ids=str
)
def test_config_that_describes_no_causal_language_model_is_refused(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError) as caught:
        build_on_meta(tmp_path, dtype=torch.float32)
    assert str(caught.value).startswith(
        f"{tmp_path}/config.json does not describe a causal language model"
    )
    assert str(caught.value).endswith("Check model.source and model.attention.")


def test_attention_that_the_family_has_not_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(
        UserError,
        match=r"can build with sdpa attention \(.*Check model\.source and model\.attention",
    ):
        build_on_meta(tmp_path, dtype=torch.float32, attention="sdpa")
    build_on_meta(tmp_path, dtype=torch.float32)


def test_code_of_the_folder_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "odd",'
        ' "auto_map": {"AutoConfig": "odd.C", "AutoModelForCausalLM": "odd.M"}}'
    )
    (tmp_path / "odd.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()"
    )
    with pytest.raises(UserError):
        build_on_meta(tmp_path, dtype=torch.float32)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("ernie4_5_moe", "model.layers.1.mlp.gate.weight"),
    ],
)
def test_what_chooses_experts_keeps_the_precision_that_its_family_asks_for(
    family: str, name: str, tmp_path: Path
) -> None:
    base = quantized(tiny_family(family, tmp_path / "original"), tmp_path / "nf4")
    model = build_nf4_on_meta(base, compute_dtype=torch.bfloat16, attention="eager")
    materialize_(model, transformers_model=model, device=torch.device("cpu"))
    load_weights_(model, base)
    with CheckpointReader(base) as reader:
        stored = reader.tensor(name)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert tensors[name].dtype == torch.float32
    assert torch.equal(tensors[name], stored)
    assert tensors["model.norm.weight"].dtype == torch.bfloat16
