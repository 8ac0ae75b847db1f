"""The stage with `quantize.method: calibrated` for mixtures of experts, of each way in which
families keep them."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.stages.test_quantize_calibrated import CPU, quantize
from tests.support.mixtures import tiny_mixture
from tests.support.tiny import tiny_tokenizer
from tests.support.tokenizing import Stage
from workflow.lib.export.stock_models import load_base
from workflow.lib.model.layers.expert_stacks import expert_stacks
from workflow.lib.quantization import expert_tokens
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


def test_stacks_are_better_than_absmax_for_their_inputs(base):
    record = read_checked_json(base / "quantization.json")
    stacks = record["calibration"]["stacks"]
    assert record["quantized_stacks"] == len(stacks) == 4
    for path, errors in stacks.items():
        for expert in ("median", "worst"):
            assert errors[expert]["calibrated"] < 0.9 * errors[expert]["absmax"], (path, expert)
        assert errors["median"]["calibrated"] <= errors["worst"]["calibrated"]
        assert 0 <= errors["worst_expert"] < 11


def test_routers_stay_as_they_are(base, tokens):
    ours: dict[str, torch.Tensor] = {}
    for path in base.glob("*.safetensors"):
        ours |= load_file(path)
    theirs = load_file(tokens / "qwen3_moe" / "model.safetensors")
    routers = [name for name in theirs if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    for name in routers:
        assert torch.equal(ours[name], theirs[name]), name


def test_experts_that_few_tokens_reach_are_told(tokens, tmp_path, monkeypatch):
    """256 tokens, of which each goes to 2 of 11 experts: 47 for one, and the weights have 64 and 48
    inputs."""
    monkeypatch.setattr(expert_tokens, "ENOUGH", 1.0)
    model = tokens / "qwen3_moe"
    base = quantize(tokens, tmp_path / "base", model=model, calibration_tokens=256)
    stacks = read_checked_json(base / "quantization.json")["calibration"]["stacks"]
    wide = [x for path, x in stacks.items() if path.endswith("gate_up_proj")]
    assert all(0 < errors["filled"] <= 11 and errors["fewest_tokens"] < 64 for errors in wide)
    for errors in stacks.values():
        assert errors["worst"]["calibrated"] < errors["worst"]["absmax"]


@pytest.mark.parametrize("settings", [{"double_quant": False}, {"block_size": 128}], ids=str)
def test_stock_packages_decode_what_the_errors_were_measured_on(settings, tokens, tmp_path):
    model = tokens / "qwen3_moe"
    base = quantize(tokens, tmp_path / "base", model=model, **settings)
    record = read_checked_json(base / "quantization.json")["calibration"]
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stock = load_base(base, device=CPU, compute_dtype=torch.float32, attention="sdpa")
    decoded = dict(stock.named_parameters())
    for path in expert_stacks(original):
        worst = record["stacks"][path]["worst_expert"]
        weight = original.get_parameter(path)[worst].detach()
        ours = stacked(decoded, stock, path)[worst]
        lost = (weight - ours).square().sum() / weight.square().sum()
        expected = record["stacks"][path]["worst"]["calibrated_plain"]
        assert float(lost) == pytest.approx(expected, rel=1e-4), path


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
