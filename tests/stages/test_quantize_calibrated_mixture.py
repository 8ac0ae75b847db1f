"""The stage with `quantize.method: calibrated` for mixtures of experts, of each way in which
families keep them."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.stages.test_quantize_calibrated import quantize
from tests.support.mixtures import tiny_mixture
from tests.support.models import stock_base
from tests.support.tiny import tiny_tokenizer
from tests.support.tokenizing import Stage
from workflow.lib.checkpoints.decoder_layers import expert_stacks
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_checked_json


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    tiny_tokenizer(folder / "tokenizer")
    Stage(folder, folder / "tokenizer").run()
    return folder


def mixture(family, folder):
    tokenizer = tiny_tokenizer(folder)
    return tiny_mixture(family, folder, vocab_size=len(tokenizer))


@pytest.fixture(scope="module")
def base(tokens):
    mixture("qwen3_moe", tokens / "qwen3_moe")
    return quantize(tokens, tokens / "base", model=tokens / "qwen3_moe")


def test_routers_stay_as_they_are(base, tokens):
    ours: dict[str, torch.Tensor] = {}
    for path in base.glob("*.safetensors"):
        ours |= load_file(path)
    theirs = load_file(tokens / "qwen3_moe" / "model.safetensors")
    routers = [name for name in theirs if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    for name in routers:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("settings", [{"double_quant": False}, {"block_size": 128}], ids=str)
def test_stock_packages_decode_every_expert(settings, tokens, tmp_path):
    model = tokens / "qwen3_moe"
    base = quantize(tokens, tmp_path / "base", model=model, **settings)
    assert read_checked_json(base / "quantization.json")["quantized_stacks"] == 4
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stock = stock_base(base)
    decoded = dict(stock.named_parameters())
    for path in expert_stacks(original):
        weight, ours = original.get_parameter(path).detach(), stacked(decoded, stock, path)
        lost = (weight - ours).square().sum((1, 2)) / weight.square().sum((1, 2))
        # absmax loses 0.01; another expert's scales, or a stack turned over, would lose most
        assert 0 < float(lost.min()) <= float(lost.max()) < 0.1, path


def stacked(decoded, stock, path):
    module, _, name = path.rpartition(".")
    value: torch.Tensor = getattr(stock.get_submodule(module), name)
    return value.detach().float()


def test_expert_with_values_that_are_not_finite_is_named(tokens, tmp_path):
    model = mixture("qwen3_moe", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.experts.7.down_proj.weight"].view(-1)[5] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    expected = r"model\.layers\.1\.mlp\.experts\.7\.down_proj\.weight\[0, 5\] is nan"
    with pytest.raises(UserError, match=expected):
        quantize(tokens, tmp_path / "base", model=model)
