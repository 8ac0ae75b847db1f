"""Descriptions of tiny models of many families hold what the built modules have; what is not
covered is refused by name."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.families import GEMMA4, MOE, tiny_family, tiny_model
from tests.support.models import adapted, quantized, tiny_llama
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.config_file import read_config
from workflow.lib.export.stock_models import load_base
from workflow.lib.model.architecture.model_shape import shape_of_document
from workflow.lib.model.describe_model import describe_checkpoint, describe_config
from workflow.lib.system.errors import UserError

SIZES: dict[str, Any] = {
    "hidden_size": 80,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "vocab_size": 211,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
WINDOWS = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "layer_types": WINDOWS},
    "gemma4_text": {
        "head_dim": 16,
        "layer_types": WINDOWS,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
}


def described(family, **changes):
    config = SIZES | FAMILIES.get(family, {}) | changes | {"model_type": family}
    return describe_config(config, origin=Path("config.json"))


def test_layers_that_differ_are_kinds_of_their_own_in_their_order():
    shape = described("gemma2")
    assert [shape.layer(n).attention for n in range(4)] == ["sliding", "full"] * 2
    assert shape.attention_masks == 2
    assert described("llama").order == (0, 0, 0, 0)


def test_layer_with_wider_heads_is_a_kind_of_its_own():
    shape = described("gemma4_text", global_head_dim=32)
    assert [shape.layer(n).head_dim for n in range(4)] == [16, 32, 16, 32]
    assert [x.num_heads * x.head_dim for x in map(shape.layer, range(4))] == [80, 160, 80, 160]


LAYER_EMBEDDINGS = {
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 211,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}


def test_tables_and_linears_beside_the_layers_are_described():
    """Of a decoder whose layers have embeddings of their own, and share keys and values."""
    shape = described("gemma4_text", **LAYER_EMBEDDINGS)
    config = AutoConfig.for_model(
        "gemma4_text", **SIZES | FAMILIES["gemma4_text"] | LAYER_EMBEDDINGS
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    stored = model.state_dict()
    del stored[f"{shape.head}.weight"]  # tied
    weights = shape.quantized_weights + shape.plain_weights
    assert weights == sum(x.numel() for x in stored.values())
    assert shape.other_tables == (("model.embed_tokens_per_layer.weight", (211, 4 * 12)),)
    assert "model.per_layer_model_projection" in shape.linear_paths()
    assert [x.name for x in shape.layer(2).linears][:2] == ["q_proj", "o_proj"]
    assert shape_of_document(json.loads(json.dumps(shape.document()))) == shape


def test_decoder_of_a_multimodal_checkpoint_is_described(tmp_path):
    folder = tiny_family("gemma3", tmp_path)
    shape = describe_checkpoint(Checkpoint.open(folder))
    assert shape.embedding == "model.language_model.embed_tokens"
    assert shape.tied_embeddings
    assert shape.left_tensors == 0
    assert shape.kinds == describe_config(read_config(folder / "config.json"), origin=folder).kinds


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"model_type": "nothing"}, ["model_type = 'nothing'", "knows no such model"]),
    ({"model_type": None}, ["model_type = None", "knows no such model"]),
    (
        {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}},
        ["model_type = 'own' is code of the model's own repository (auto_map)", "never run"],
    ),
    ({"model_type": "t5"}, ["model_type = 't5' is an encoder-decoder", "causal language"]),
    (SIZES | {"model_type": "bart"}, ["model_type = 'bart' is an encoder-decoder"]),
    (
        SIZES | {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        ["architectures = ['BertForMaskedLM']: this is no causal language model"],
    ),
    (SIZES | {"model_type": "vit"}, ["'vit'", "has no causal language model of this type"]),
    (
        SIZES | GEMMA4 | {"model_type": "gemma3n_text", "laurel_rank": 8},
        ["'gemma3n_text'", "several streams of hidden states"],
    ),
    (
        SIZES | GEMMA4 | {"model_type": "gemma3n_text", "intermediate_size": [176, 0]},
        ["intermediate_size = 0: must be a whole number above 0"],
    ),
    (
        SIZES | {"model_type": "llama", "vocab_size": None},
        ["vocab_size = None: must be a whole number above 0"],
    ),
    (
        SIZES | {"model_type": "llama", "num_key_value_heads": 3},
        ["5 query heads cannot share 3 key heads equally"],
    ),
    (
        SIZES | {"model_type": "exaone4", "layer_types": ["full_attention"]},
        ["does not describe a model", "`num_hidden_layers`", "Check model.source"],
    ),
    (SIZES | {"model_type": "bloom", "n_layer": 10**9}, ["n_layer = 1000000000: must be"]),
    (
        SIZES | {"model_type": "zamba", "num_hidden_layers": 12, "mamba_dt_rank": 8},
        ["'zamba'", "decoder layers 2 and 7 share weights (model.layers.7.shared_transf"],
    ),
    (
        {"model_type": "paligemma", "text_config": SIZES | {"model_type": "gemma"}},
        ["'paligemma'", "its attention sees the tokens that follow"],
    ),
    (
        SIZES | {"model_type": "mixtral", "num_local_experts": 1, "num_experts_per_tok": 1},
        ["'mixtral'", "its mixtures have one expert"],
    ),
    (
        {"model_type": "kosmos-2.5", "text_config": {}},
        ["'kosmos-2.5'", "its decoder Kosmos2_5TextForCausalLM returns logits, and no hidden"],
    ),
    (
        {"model_type": "kosmos-2", "text_config": {}},
        ["'kosmos-2'", "does not run on token ids and a mask", "choose another model.source"],
    ),
    (
        SIZES | MOE | {"model_type": "laguna", "shared_expert_intermediate_size": 64},
        ["'laguna'", "an adapter on model.layers.1.mlp.shared_experts"],
    ),
]


@pytest.mark.parametrize(
    ("config", "parts"), REFUSED, ids=[str(config["model_type"]) for config, _ in REFUSED]
)
def test_what_is_not_covered_is_refused_by_name(config, parts):
    with pytest.raises(UserError) as caught:
        describe_config(config, origin=Path("config.json"))
    for part in ("config.json", *parts):
        assert part in str(caught.value)


def test_checkpoint_under_other_names_is_described_if_it_is_whole(tmp_path):
    """Checkpoints of `hy_v3` name shared experts otherwise than Transformers names the modules."""
    layers = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
    tiny_model(AutoConfig.for_model("hy_v3", **(SIZES | MOE | layers)), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    linears = {f"{x}.weight" for x in describe_checkpoint(Checkpoint.open(tmp_path)).linear_paths()}
    assert linears - tensors.keys(), "all have the modules' names: nothing is tried"
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(UserError, match="has no tensor model"):
        describe_checkpoint(Checkpoint.open(tmp_path))


def test_infinity_is_read_however_it_is_written(tmp_path):
    """Transformers 5 writes an object in its place, and Python a word that is no JSON."""
    config = SIZES | {
        "model_type": "granitemoehybrid",
        "mamba_n_heads": 10,
        "mamba_d_head": 16,
        "time_step_limit": [0.0, math.inf],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert '"time_step_limit": [0.0, Infinity]' in (tmp_path / "config.json").read_text()
    read = read_config(tmp_path / "config.json")
    assert read["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert describe_config(read, origin=tmp_path) == describe_config(
        {k: v for k, v in config.items() if k != "time_step_limit"}, origin=tmp_path
    )


LAST_USE: dict[str, Any] = {
    "return_dict": False,
    "output_attentions": True,
    "output_hidden_states": True,
    "_attn_implementation": "flash_attention_2",
}


@pytest.mark.parametrize("setting", LAST_USE)
def test_what_a_models_last_user_wanted_of_its_calls_changes_nothing(tmp_path, setting):
    """Training and stock packages compute as without it."""
    folder = tiny_llama(tmp_path, num_hidden_layers=1)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    stock = {"device": torch.device("cpu"), "compute_dtype": torch.float32, "attention": "sdpa"}
    plain, logits = (
        describe_checkpoint(Checkpoint.open(folder)),
        load_base(Checkpoint(folder), **stock)(ids).logits,
    )
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {setting: LAST_USE[setting]}))
    assert (
        replace(describe_checkpoint(Checkpoint.open(folder)), config_sha256=plain.config_sha256)
        == plain
    )
    assert torch.equal(load_base(Checkpoint(folder), **stock)(ids).logits, logits)
    training = adapted(quantized(folder, tmp_path / "nf4"))
    assert training.hidden_states(ids, torch.arange(5)[None]).shape == (5, plain.hidden_size)


@pytest.mark.parametrize("said", ["{", '{"max_new_tokens": 0}'], ids=["broken", "refused"])
def test_generation_settings_that_cannot_be_read_are_refused_with_the_model(tmp_path, said):
    folder = tiny_llama(tmp_path, num_hidden_layers=1)
    (folder / "generation_config.json").write_text(said)
    with pytest.raises(UserError, match=r"generation_config\.json: Transformers .* cannot read it"):
        describe_checkpoint(Checkpoint.open(folder))


@pytest.mark.parametrize(("zeros", "fault"), [(4095, ""), (12_000, "norm.weight")])
def test_file_that_ends_in_zeros_is_named_with_its_tensors(zeros, fault, tmp_path):
    """The end was never written, though the file has its size."""
    file = tiny_llama(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-zeros] + bytes(zeros))
    if not fault:
        describe_checkpoint(Checkpoint.open(tmp_path))
        return
    with pytest.raises(UserError, match=r"model.safetensors ends in zeros, in \d+ of its \d+ tens"):
        describe_checkpoint(Checkpoint.open(tmp_path))


def test_table_whose_last_rows_are_zeros_is_taken(tmp_path):
    """Rows of tokens that no tokenizer has, at the end of a shard."""
    folder = tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    head[-64:] = 0
    (folder / "model.safetensors").unlink()
    shards = {
        "model-1-of-2.safetensors": tensors,
        "model-2-of-2.safetensors": {"lm_head.weight": head},
    }
    for name, part in shards.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    describe_checkpoint(Checkpoint.open(folder))
