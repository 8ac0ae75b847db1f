"""Building and loading models: every kind of family gives the stock model's logits; what cannot is
refused."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from tests.support.families import tiny_family
from tests.support.models import adapted, quantized, tiny_llama
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.model.layers.frozen_linear import FrozenLinear, frozen_linears
from workflow.lib.model.nf4_model import build_base_on_meta, load_weights_, materialize_
from workflow.lib.system.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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
def loaded(folder):
    model = build_base_on_meta(
        Checkpoint(folder / "nf4"), compute_dtype=torch.float32, attention="sdpa"
    )
    materialize_(model, transformers_model=model, device=CPU)
    load_weights_(model, Checkpoint(folder / "nf4").stored())
    return model


def test_every_linear_but_the_head_is_nf4_and_nothing_is_trainable(loaded):
    linears = dict(frozen_linears(loaded))
    assert len(linears) == 3 * 7
    assert not isinstance(loaded.lm_head, FrozenLinear)
    assert not any(p.requires_grad for p in loaded.parameters())


def test_rotary_table_is_that_of_a_normally_built_model(folder, loaded):
    """It is in no checkpoint; scaled as Llama 3.1 does, so that a default table would show."""
    config = LlamaConfig.from_pretrained(folder / "original")
    normal = LlamaForCausalLM(config).model.rotary_emb
    assert torch.equal(loaded.model.rotary_emb.inv_freq, normal.inv_freq)
    plain = 1 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    assert not torch.allclose(normal.inv_freq, plain)


def test_tied_weights_stay_one_tensor(tmp_path):
    base = quantized(tiny_llama(tmp_path / "original", tied=True), tmp_path / "nf4")
    training = adapted(base)
    model = training.peft_model.get_base_model()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(
        model.get_input_embeddings().weight,
        load_file(tmp_path / "original" / "model.safetensors")["model.embed_tokens.weight"],
    )


def test_bytes_read_are_those_of_the_checkpoint_without_code_tables(folder, loaded):
    stored = {}
    for file in (folder / "nf4").glob("*.safetensors"):
        stored |= load_file(file)
    data = [
        t.nbytes
        for name, t in stored.items()
        if "quant_map" not in name and "quant_state" not in name
    ]
    assert load_weights_(loaded, Checkpoint(folder / "nf4").stored()) == sum(data)


class OddRotary(torch.nn.Module):
    """Holds a table of its own, integer or float, that no family computes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, dtype=dtype, device="meta"), persistent=False)
        self.register_buffer("nothing", None, persistent=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_buffer_that_nobody_computes_is_refused(folder, dtype):
    """It would hold whatever was in memory."""
    model = build_base_on_meta(
        Checkpoint(folder / "nf4"), compute_dtype=torch.float32, attention="sdpa"
    )
    model.model.odd = OddRotary(dtype)
    with pytest.raises(UserError) as caught:
        materialize_(model, transformers_model=model, device=CPU)
    assert str(caught.value) == (
        "LlamaForCausalLM is not supported: its buffer table of OddRotary cannot be computed "
        "without a checkpoint. Choose another model.source."
    )


def test_stored_buffer_that_the_checkpoint_lacks_is_refused(folder):
    model = build_base_on_meta(
        Checkpoint(folder / "nf4"), compute_dtype=torch.float32, attention="sdpa"
    )
    model.model.register_buffer("layer_scalar", torch.ones(1, device="meta"))
    materialize_(model, transformers_model=model, device=CPU)
    with pytest.raises(UserError, match=r"has no tensor 'model\.layer_scalar'"):
        load_weights_(model, Checkpoint(folder / "nf4").stored())


def test_checkpoint_of_another_model_is_refused(folder, tmp_path):
    tiny_llama(tmp_path / "wide", intermediate_size=96)
    for file in (folder / "nf4").iterdir():
        if file.name != "config.json":
            (tmp_path / "wide" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "wide" / "model.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        build_base_on_meta(
            Checkpoint(tmp_path / "wide"), compute_dtype=torch.float32, attention="sdpa"
        )
    assert "has a quantized weight model.layers.0.mlp.gate_proj of shape (176, 80)" in str(
        caught.value
    )
    assert "Delete its folder below results/base" in str(caught.value)


@pytest.mark.parametrize(
    "text", ['{"model_type": "no_such_model"}', "{}", "{", '{"model_type": "vit"}'], ids=str
)
def test_config_that_describes_no_causal_language_model_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError) as caught:
        Checkpoint(tmp_path).build(torch.float32)
    assert str(caught.value).startswith(
        f"{tmp_path}/config.json does not describe a causal language model"
    )
    assert str(caught.value).endswith("Check model.source and model.attention.")


def test_attention_that_the_family_has_not_is_refused(tmp_path):
    AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(
        UserError,
        match=r"can build with sdpa attention \(.*Check model\.source and model\.attention",
    ):
        Checkpoint(tmp_path).build(torch.float32, attention="sdpa")
    Checkpoint(tmp_path).build(torch.float32)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("ernie4_5_moe", "model.layers.1.mlp.gate.weight"),
    ],
)
def test_what_chooses_experts_keeps_the_precision_that_its_family_asks_for(family, name, tmp_path):
    base = quantized(tiny_family(family, tmp_path / "original"), tmp_path / "nf4")
    model = build_base_on_meta(Checkpoint(base), compute_dtype=torch.bfloat16, attention="eager")
    materialize_(model, transformers_model=model, device=torch.device("cpu"))
    load_weights_(model, Checkpoint(base).stored())
    with CheckpointReader(base) as reader:
        stored = reader.tensor(name)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert tensors[name].dtype == torch.float32
    assert torch.equal(tensors[name], stored)
    assert tensors["model.norm.weight"].dtype == torch.bfloat16
