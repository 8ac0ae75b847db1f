"""The random base of the benchmark is a checkpoint like any other, for our engine and for stock
Transformers."""

import bitsandbytes as bnb
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.mixtures import tiny_mixture
from tests.support.models import tiny_llama
from workflow.benchmark.random_base import write_random_base
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.model.layers.frozen_stack import FrozenStack
from workflow.lib.model.nf4_model import build_base_on_meta, load_weights_, materialize_
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.files import read_json


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Both forms of the random base of a tiny shape."""
    folder = tmp_path_factory.mktemp("bases")
    config = read_json(tiny_llama(folder / "model") / "config.json")
    for name, float_storage in (("ours", False), ("peers", True)):
        write_random_base(folder / name, config, QuantizeConfig(), float_storage=float_storage)
    return {name: folder / name for name in ("model", "ours", "peers")}


def stock_logits(base):
    """Return the logits of a few tokens by stock Transformers and bitsandbytes."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # it packs weights of rounder sizes alone
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[1, 5, 9, 2]])).logits
    return logits


def test_stock_transformers_reads_the_same_model_from_both_forms(bases):
    assert torch.equal(stock_logits(bases["ours"]), stock_logits(bases["peers"]))


def test_peers_get_packed_weights_in_a_type_that_fsdp_shards(bases):
    model = AutoModelForCausalLM.from_pretrained(bases["peers"], dtype=torch.float32)
    weight = model.get_submodule("model.layers.0.self_attn.q_proj").weight
    assert type(weight).__name__ == "Params4bit"
    assert weight.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_random_mixture_has_its_experts_in_nf4(tmp_path, family):
    config = read_json(tiny_mixture(family, tmp_path / "model") / "config.json")
    write_random_base(tmp_path / "base", config, QuantizeConfig())
    model = build_base_on_meta(
        Checkpoint(tmp_path / "base"), compute_dtype=torch.float32, attention="eager"
    )
    materialize_(model, transformers_model=model, device=torch.device("cpu"))
    assert load_weights_(model, Checkpoint(tmp_path / "base").stored()) > 0
    stacks = [module for module in model.modules() if isinstance(module, FrozenStack)]
    assert len(stacks) == 2 * (1 if family == "deepseek_v3" else 2)
    for stack in stacks:
        weights = stack.dequantize_experts(0, stack.num_experts, torch.float32)
        assert weights.std().item() == pytest.approx(0.02, rel=0.1)
