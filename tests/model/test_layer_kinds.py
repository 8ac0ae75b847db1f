"""Descriptions have what built modules have, also of layers that are not plain."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.families import FAMILIES, ROUTED_IN_GROUPS
from tests.support.other_decoders import IN_GROUPS, MIXTURES, OTHERS, config_of
from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.model.adaptable_linears import takes_adapter
from workflow.lib.model.architecture.model_shape import shape_of_document
from workflow.lib.model.describe_model import describe_config
from workflow.lib.system.errors import UserError


def described(family, **changes):
    return describe_config(config_of(family) | changes, origin=Path("config.json"))


def built(family):
    content = config_of(family)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(content.pop("model_type"), **content)
        )
    return model


TEXT_ALONE = [name for name, case in FAMILIES.items() if "text_config" not in case.changes]


@pytest.mark.parametrize("family", dict.fromkeys((*TEXT_ALONE, *OTHERS)))
def test_description_has_what_the_built_modules_have(family):
    shape, model = described(family), built(family)
    stored = model.state_dict()
    if shape.tied_embeddings:
        del stored[f"{shape.head}.weight"]
    assert shape.quantized_weights + shape.plain_weights == sum(
        tensor.numel() for tensor in stored.values()
    )
    for number, layer in enumerate(decoder_layers(model)):
        kind, tensors = shape.layer(number), layer.state_dict()
        for linear in kind.linears:
            if linear.experts == 1:
                size = tensors.pop(f"{linear.path}.weight").shape
                assert size == (linear.out_features, linear.in_features)
            else:
                assert tensors.pop(linear.path).numel() == linear.num_weights
        others = {name: tuple(x.shape) for name, x in tensors.items()}
        assert others == dict(kind.tensors) | {
            name: () if others[name] == () else (length,) for name, length in kind.vectors
        }


@pytest.mark.parametrize("family", MIXTURES)
def test_stack_is_a_linear_of_all_experts_that_knows_their_number(family):
    kind = described(family).kinds[-1]
    gate_up, down = (x for x in kind.linears if x.experts > 1)
    count = ROUTED_IN_GROUPS["n_routed_experts"] if family in IN_GROUPS else 5
    assert (gate_up.experts, gate_up.name, down.name) == (count, "gate_up_proj", "down_proj")
    width = down.in_features
    assert (gate_up.out_features, gate_up.in_features) == (count * 2 * width, kind.hidden_size)
    assert down.out_features == count * kind.hidden_size
    assert kind.top_k == (3 if family == "olmoe" else 2)
    of_experts = gate_up.num_weights + down.num_weights
    assert kind.used_weights == kind.num_weights - of_experts + of_experts * kind.top_k // count


def test_router_stays_in_16_bits_also_where_it_is_a_linear():
    kind = described("hunyuan_v1_moe").kinds[0]
    assert dict(kind.tensors) == {"mlp.gate.wg.weight": (5, 48)}
    assert "mlp.gate.wg" not in [linear.path for linear in kind.linears]


def test_linear_that_takes_no_adapter_stays_in_16_bits():
    model, kind = built("falcon_h1"), described("falcon_h1").kinds[0]
    assert not takes_adapter(model, "mamba.out_proj")
    assert dict(kind.tensors)["mamba.out_proj.weight"] == (48, 48)


@pytest.mark.parametrize(
    ("family", "attention", "recurrent"),
    [
        ("qwen3_next", ["none", "full"], [True, False]),
        ("lfm2", ["none", "full"], [True, False]),
        ("falcon_h1", ["full", "full"], [True, True]),
        ("nemotron_h", ["none", "full", "none"], [True, False, False]),
        ("gpt_oss", ["sliding", "full"], [False, False]),
    ],
)
def test_how_tokens_of_a_layer_see_each_other(family, attention, recurrent):
    shape = described(family)
    kinds = [shape.layer(number) for number in range(shape.num_layers)]
    assert [kind.attention for kind in kinds] == attention
    assert [kind.recurrent for kind in kinds] == recurrent


def test_latent_attention_has_values_of_a_width_of_their_own():
    kind = described("deepseek_v3").kinds[0]
    assert (kind.head_dim, kind.value_dim, kind.num_heads, kind.num_kv_heads) == (24, 12, 3, 3)
    assert (kind.num_heads * kind.head_dim, kind.value_width) == (72, 36)


def test_sinks_are_seen():
    assert all(kind.sinks for kind in described("gpt_oss").kinds)
    assert not any(kind.sinks for kind in described("mixtral").kinds)


def test_description_of_other_layers_is_read_as_it_was_written():
    shape = described("qwen3_next")
    assert shape_of_document(shape.document()) == shape


def test_class_without_a_decoder_of_its_own_is_refused():
    sizes = {"num_local_experts": 4, "interleave_moe_layer_step": 1}
    with pytest.raises(UserError) as caught:
        described("mixtral", model_type="llama4_text", **sizes)
    assert "its decoder Llama4ForCausalLM returns logits, and no hidden states" in str(caught.value)


def test_model_without_linears_is_refused():
    """GPT-2 keeps its weights in a class of its own."""
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 64, "n_inner": 96}
    with pytest.raises(UserError, match="GPT2Block has no linear whose weights can be quantized"):
        described("llama", model_type="gpt2", **sizes)
