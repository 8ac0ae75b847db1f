"""Of several sets of weights in a folder, those are read that stock Transformers loads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.models import tiny_llama
from workflow.lib.checkpoints.checkpoint import Checkpoint, loaded_tensors
from workflow.lib.checkpoints.safetensors_reader import check_whole
from workflow.lib.system.errors import UserError

INDEX = "model.safetensors.index.json"
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 11,
}


def save(tensors, file):
    save_file(tensors, file, metadata={"format": "pt"})


def index(folder, files):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def other(tensors):
    return {name: tensor + 1 for name, tensor in tensors.items()}


def alone(folder, tensors):
    """A single file."""


def beside_shards(folder, tensors):
    save(other(tensors), folder / "model-00001-of-00001.safetensors")
    index(folder, dict.fromkeys(tensors, "model-00001-of-00001.safetensors"))


def sharded(folder, tensors):
    """Shards, with another set that the index does not name, and Mistral's own file."""
    (folder / "model.safetensors").unlink()
    for number, part in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        save({name: tensors[name] for name in part}, folder / f"model-0{number}-of-02.safetensors")
    save(other(tensors), folder / "model-00001-of-00001.safetensors")
    save(other(tensors), folder / "consolidated.safetensors")
    halves = {
        name: f"model-0{1 + n % 2}-of-02.safetensors" for n, name in enumerate(sorted(tensors))
    }
    index(folder, halves)


def not_all_in_the_index(folder, tensors):
    """A shard with tensors that the index does not name: Transformers reads whole files."""
    (folder / "model.safetensors").rename(folder / "all.safetensors")
    index(folder, {"model.norm.weight": "all.safetensors"})


def beside_others(folder, tensors):
    torch.save(other(tensors), folder / "pytorch_model.bin")
    save(other(tensors), folder / "model.fp16.safetensors")


def named_by_config(folder, tensors):
    (folder / "model.safetensors").rename(folder / "own.safetensors")
    save(other(tensors), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"transformers_weights": "own.safetensors"})
    )


LAYOUTS = (alone, beside_shards, sharded, not_all_in_the_index, beside_others, named_by_config)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.__name__)
def test_weights_are_those_that_transformers_loads(tmp_path, layout):
    folder = tiny_llama(tmp_path, **SIZES)
    layout(folder, load_file(folder / "model.safetensors"))
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check_whole(folder)
    assert "transformers_weights" not in Checkpoint(folder).plain_config
    with Checkpoint(folder).weights() as reader:
        assert {*reader.names()} == {name for name, _ in stock.named_parameters()}
        for name, param in stock.named_parameters():
            assert torch.equal(reader.tensor(name), param)


def test_tensor_that_transformers_takes_of_another_shard_than_the_index_names_is_refused(tmp_path):
    folder = tiny_llama(tmp_path, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save({"model.norm.weight": tensors["model.norm.weight"] + 1}, folder / "b.safetensors")
    index(folder, dict.fromkeys(tensors, "a.safetensors") | {"x": "b.safetensors"})
    with pytest.raises(UserError, match=r"'model.norm.weight', but Transformers takes that of b\."):
        loaded_tensors(folder)
