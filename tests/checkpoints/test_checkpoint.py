"""A model's folder as one object."""

import json

import pytest
import torch

from tests.support.families import tiny_family
from tests.support.mixtures import tiny_mixture
from tests.support.models import quantized, tiny_llama
from tests.support.packed_checkpoints import integer_checkpoint
from tests.system.test_checksums import recorded_as_download
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export.stock_models import load_base
from workflow.lib.export.trial import write_narrow_adapter
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.quantization.nf4_checkpoint import write_plain_base
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import UserError


def content(model):
    tensors = {name: (x.shape, x.dtype, x.device) for name, x in model.state_dict().items()}
    modules = {path: (type(module), vars(module).keys()) for path, module in model.named_modules()}
    return tensors, modules, json.dumps(model.config.to_dict(), default=str)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_nothing_that_reads_the_model_without_values_changes_it(family, tmp_path):
    checkpoint = Checkpoint.open(tiny_family(family, tmp_path / "model"))
    before = content(checkpoint.model)
    describe_checkpoint(checkpoint)
    write_plain_base(checkpoint, tmp_path / "nf4", QuantizeConfig())
    write_narrow_adapter(checkpoint, tmp_path / "adapter")
    load_base(
        checkpoint, device=torch.device("cpu"), compute_dtype=torch.float32, attention="eager"
    )
    assert content(checkpoint.model) == before


def without_config(folder):
    (folder / "config.json").unlink()


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def with_settings(**settings):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def changed_after_the_download(folder):
    recorded_as_download(folder)
    with_settings(vocab_size=7)(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_config, "it has no config.json"),
        (without_weights, "it has no weights, neither model.safetensors"),
        (cut_short, "is not a whole safetensors file: its header promises"),
        (with_settings(num_hidden_layers=10**6), "num_hidden_layers = 1000000: must be at most"),
        (with_settings(quantization_config=[1]), "it must be an object or null"),
        (changed_after_the_download, "config.json is damaged: it does not have the SHA-256"),
    ],
)
def test_folder_is_refused_when_it_is_opened(change, words, tmp_path):
    change(tiny_llama(tmp_path))
    with pytest.raises(UserError, match=words):
        Checkpoint.open(tmp_path)


def test_engine_reads_nf4_as_stored_and_other_formats_in_16_bits(tmp_path):
    published = Checkpoint(integer_checkpoint(tmp_path / "model", "gptq"))
    base = Checkpoint(quantized(published.folder, tmp_path / "nf4"))
    linear = "model.layers.0.mlp.down_proj"
    with published.reader() as decoded, base.reader() as stored:
        assert decoded.dtype(f"{linear}.weight") == "BF16"
        assert f"{linear}.scales" not in decoded
        assert stored.dtype(f"{linear}.weight") == "U8"
        assert f"{linear}.weight.absmax" in stored


def test_model_that_is_changed_is_another_one(tmp_path):
    checkpoint = Checkpoint(tiny_mixture("qwen3_moe", tmp_path))
    before = content(checkpoint.model)
    other = checkpoint.build(torch.float32)
    other.config.vocab_size = 1
    del other.model.layers[0]
    assert content(checkpoint.model) == before
