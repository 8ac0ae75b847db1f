"""A checkpoint under its published names is read under those of Transformers' modules."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.support.families import multimodal, tiny_family, tiny_model
from tests.support.models import tiny_llama
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import other_parts
from workflow.lib.checkpoints.meta_model import auto_class
from workflow.lib.system.errors import UserError

RENAMED = {
    "gpt_neox": ("embed_out.weight", "lm_head.weight"),
    "gemma3": ("language_model.model.norm.weight", "model.language_model.norm.weight"),
    "olmo_hybrid": (
        "model.layers.0.attention_layer_norm.weight",
        "model.layers.0.input_layernorm.weight",
    ),
}


def meta_model(folder):
    return Checkpoint(folder).build(torch.float32)


@pytest.mark.parametrize("family", RENAMED)
def test_tensors_are_those_that_transformers_loads(tmp_path, family):
    stored, name = RENAMED[family]
    folder = tiny_family(family, tmp_path / family)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert Checkpoint(folder).names.of(stored) == name
    with Checkpoint(folder).weights() as reader:
        assert name in reader
        assert stored not in reader
        assert {*reader.names()} == {n for n, _ in loaded.named_parameters()}
        for path, param in loaded.named_parameters():
            assert reader.shape(path) == tuple(param.shape)
            assert reader.dtype(path) == "F32"
            assert torch.equal(reader.tensor(path), param)
            assert torch.equal(reader.rows(path, 1, 3), param[1:3])


def test_part_of_a_converted_tensor_has_the_name_of_the_whole(tmp_path):
    folder = tiny_family("olmo_hybrid", tmp_path / "model")
    names = Checkpoint(folder).names
    whole = "model.layers.0.linear_attn.conv1d.weight"
    parts = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    assert {names.of(part) for part in parts} == {whole}
    stored = load_file(folder / "model.safetensors")
    with Checkpoint(folder).weights() as reader:
        assert torch.equal(reader.tensor(whole), torch.cat([stored[part] for part in parts]))


def test_tensor_that_the_model_has_no_place_for_keeps_its_name(tmp_path):
    folder = tiny_llama(tmp_path / "model")
    stored = load_file(folder / "model.safetensors") | {"extra.weight": torch.ones(3)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint(folder).weights() as reader:
        assert torch.equal(reader.tensor("extra.weight"), torch.ones(3))
        with pytest.raises(UserError, match=r"has no tensor 'no\.weight'"):
            reader.tensor("no.weight")


@pytest.mark.skipif("qianfan_ocr" not in CONFIG_MAPPING, reason="Transformers is older")
def test_tower_whose_queries_keys_and_values_are_stored_as_one_is_read(tmp_path):
    made = multimodal("qwen3", {"use_qk_norm": False})
    config = AutoConfig.for_model("qianfan_ocr", **made)
    folder = tiny_model(config, tmp_path / "model")
    model, loaded = meta_model(folder), auto_class(config).from_pretrained(folder)
    with Checkpoint(folder).weights() as reader:
        assert not any("k_proj" in x for x in reader.stored_shapes() if "vision" in x)
        for path, param in loaded.named_parameters():
            assert torch.equal(reader.tensor(path), param)
        assert reader.divided(other_parts(model)) is None
        assert "vision_tower" in (reader.divided([]) or "")
