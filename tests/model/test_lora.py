"""Adapters: PEFT's names and configuration, initial values of any number of processes, the fused
path."""

import math
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tests.support.models import VOCAB, adapted
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export.stock_models import decode_partial_rows_
from workflow.lib.kernels.attention.packed import document_bounds
from workflow.lib.model.fusion.fuse_layers import fuse_layers_
from workflow.lib.model.layers.lora_matmul import NF4LoraMatMul
from workflow.lib.model.lora import init_adapters_, lora_config, trainable_parameters
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.settings.config import LoraSettings

TARGETS = ("q_proj", "down_proj")


def stock(base, **lora):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, device_map="cpu")
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = torch.float32
            module.support_avx512bf16_for_cpu = False
    decode_partial_rows_(model)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))


@pytest.mark.parametrize("targets", ["all-linear", TARGETS], ids=["all", "two"])
def test_names_and_shapes_are_those_of_stock_peft(tiny_base, targets):
    ours = trainable_parameters(adapted(tiny_base, r=3, target_modules=targets))
    listed = targets if isinstance(targets, str) else list(targets)
    theirs = get_peft_model_state_dict(stock(tiny_base, r=3, target_modules=listed))
    assert {n: tuple(p.shape) for n, p in ours.items()} == {
        n: tuple(t.shape) for n, t in theirs.items()
    }
    assert len(ours) == 2 * 3 * (7 if targets == "all-linear" else 2)


def test_initial_values_are_those_of_peft_in_distribution(tiny_base):
    """A uniform in +-1/sqrt(in_features), so of variance 1/(3 in_features); B zero."""
    for name, param in trainable_parameters(adapted(tiny_base, r=16)).items():
        if ".lora_B." in name:
            assert not param.any()
            continue
        bound = 1 / math.sqrt(param.shape[1])
        assert float(param.abs().max()) <= bound
        assert float(param.abs().max()) > 0.98 * bound
        # 16 x 80 draws and more: the standard error of the mean square is 2.5%
        assert float(param.square().mean()) == pytest.approx(bound**2 / 3, rel=0.1)


def test_initial_values_depend_on_the_seed_and_differ_between_layers(tiny_base):
    training = adapted(tiny_base, r=3)

    def draw(seed):
        init_adapters_(training, seed=seed, base=Checkpoint(tiny_base).stored())
        params = trainable_parameters(training)
        return {name: p.detach().clone() for name, p in params.items() if ".lora_A." in name}

    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    same_shape = [t for t in first.values() if t.shape == (3, 80)]
    assert len({tuple(t.flatten().tolist()) for t in same_shape}) == len(same_shape)


def randomized(training):
    torch.manual_seed(3)
    for param in trainable_parameters(training).values():
        torch.nn.init.normal_(param, std=0.1)
    return training


def logits(training):
    ids = torch.randint(0, VOCAB, (1, 13), generator=torch.Generator().manual_seed(0))
    places = torch.arange(13)
    return training.logits(ids, places[None], places)


@pytest.fixture
def fused_calls(monkeypatch):
    calls: list[None] = []
    fused = NF4LoraMatMul.apply

    def counted(*args):
        calls.append(None)
        return fused(*args)

    monkeypatch.setattr(NF4LoraMatMul, "apply", counted)
    return calls


def test_dropout_is_a_function_of_the_rows_keys(tiny_base, fused_calls):
    training = randomized(adapted(tiny_base, r=3, dropout=0.5)).train()

    def loss(*keys):
        ids = torch.randint(0, VOCAB, (2, 13), generator=torch.Generator().manual_seed(0))
        places = torch.arange(13).repeat(2, 1)
        targets, bounds = ids.flatten()[:9], document_bounds(places)
        chosen = torch.arange(9)
        batch = MicroBatch(
            input_ids=ids,
            position_ids=places,
            positions=chosen,
            targets=targets,
            bounds=bounds,
            row_keys=torch.tensor(keys),
        )
        return float(training(batch).detach())

    first = loss(5, 6)
    torch.manual_seed(1)
    assert first == loss(5, 6), "whatever other random numbers are"
    assert first != loss(7, 6)
    assert len(fused_calls) == 3 * 21


def test_dropout_is_off_in_evaluation_which_is_fused(tiny_base, fused_calls):
    with_dropout = logits(randomized(adapted(tiny_base, r=3, dropout=0.5)).eval())
    assert torch.equal(with_dropout, logits(randomized(adapted(tiny_base, r=3))))
    assert len(fused_calls) == 2 * 21


def test_disabled_adapter_gives_the_base_models_logits(tiny_base):
    training = randomized(adapted(tiny_base, r=3))
    with training.peft_model.disable_adapter():
        off = logits(training)
    torch.testing.assert_close(
        off, logits(adapted(tiny_base, r=3)), rtol=0, atol=1e-5
    )  # B = 0; a sum more
    assert not torch.allclose(off, logits(training), atol=0.1)


def test_settings_reach_peft():
    config = lora_config(LoraSettings(r=5, alpha=10, dropout=0.1), linears=["a.q_proj"])
    assert (config.r, config.lora_alpha, config.lora_dropout, config.bias) == (5, 10, 0.1, "none")
    assert config.target_modules == "all-linear"


class MadeZeros(TorchDispatchMode):
    """Notes the shapes of tensors of zeros that are made within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.zeros.default:
            self.shapes.append(tuple(outputs.shape))
        return outputs


@pytest.mark.parametrize("fused", [True, False])
def test_backward_makes_no_gradients_for_what_needs_none(tiny_base, fused):
    training = adapted(tiny_base, r=3)
    if fused:
        fuse_layers_(training.peft_model.get_base_model())  # type: ignore[operator]
    ids = torch.arange(8)[None]
    batch = MicroBatch(
        input_ids=ids,
        position_ids=ids,
        positions=torch.arange(8),
        targets=torch.arange(8),
        bounds=document_bounds(ids),
    )
    loss = training(batch)
    with MadeZeros() as seen:
        loss.backward()
    assert not [shape for shape in seen.shapes if len(shape) == 2]
