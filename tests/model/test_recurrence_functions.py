"""Which functions of families we compute, too, and layers that call ours in their place. What such
models learn: `tests/training/test_families.py`."""

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.built_models import built_model
from tests.support.captures import ALONE
from tests.support.families import tiny_family
from tests.support.models import adapted, quantized, random_store
from tests.support.other_decoders import config_of
from tests.support.plans import make_plan
from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.model.layers.adapter_dropout import row_keys
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.prepared_decoder import OneByOne
from workflow.lib.model.tried_classes.called_functions import replace_called_functions_
from workflow.lib.model.tried_classes.recurrence_functions import replace_recurrences_
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.training.batches import stored_batch

OURS = "_KeepingInputs"  # the node of our operations
# How many of them a layer of the family calls: a recurrence, and short convolutions.
CALLED = {
    "qwen3_5_text": 2,
    "qwen3_next": 2,
    "olmo_hybrid": 2,
    "falcon_h1": 2,
    "nemotron_h": 2,
    "lfm2": 1,
}


def recurrent_layer(family):
    torch.manual_seed(0)
    config = config_of(family)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return next(
        module
        for layer in decoder_layers(model)
        for module in layer.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    )


def frozen(layer):
    return layer.requires_grad_(requires_grad=False)


def nodes_behind(output):
    output = output[0] if isinstance(output, tuple) else output
    seen, ahead = set(), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [before for before, _ in node.next_functions]
    return Counter(node.name().removesuffix("Backward") for node in seen)


@pytest.mark.parametrize("family", CALLED)
def test_layers_call_ours_and_compute_the_same(family):
    ours, stock = (frozen(recurrent_layer(family)) for _ in "os")
    assert replace_recurrences_(ours)
    x = torch.randn(2, 150, 48, requires_grad=True)
    found, expected = ours(x), stock(x)
    assert nodes_behind(found)[OURS] == CALLED[family]
    assert OURS not in nodes_behind(expected)
    found, expected = (y[0] if isinstance(y, tuple) else y for y in (found, expected))
    slope = torch.randn(found.shape)
    gradients = [torch.autograd.grad(y, x, slope)[0] for y in (found, expected)]
    for one, other in ((found, expected), gradients):
        assert (one - other).abs().max() < 1e-4 * other.abs().max()


@pytest.mark.parametrize("family", CALLED)
def test_layers_of_the_model_that_is_trained_call_ours(family, tmp_path):
    """They are divided by document, too, which must come after."""
    base = quantized(tiny_family(family, tmp_path / "model"), tmp_path / "base")
    lora = LoraSettings(r=2, target_modules="all-linear")
    config = RunConfig(lora=lora, train=TrainConfig(fused_layers=True))
    built = built_model(base, config, make_plan(), ALONE)
    training, fused = built.training, built.fused
    divided = [x for x in training.modules() if isinstance(x, OneByOne)]
    assert fused["recurrences"] == len(divided) > 0
    kinds = [kind for kind in type(divided[0]).__mro__ if "forward" in vars(kind)]
    called = globals_of(vars(kinds[1])["forward"])  # that of the mixture with OneByOne is the first
    assert called["causal_conv1d_fn"].__module__ == replace_recurrences_.__module__


def test_convolution_that_is_trained_is_the_familys():
    layer = recurrent_layer("lfm2")
    assert replace_recurrences_(layer)
    x = torch.randn(2, 9, 48, requires_grad=True)
    assert OURS not in nodes_behind(layer(x))


def test_call_that_begins_with_a_state_is_the_familys():
    ours, stock = (recurrent_layer("qwen3_5_text") for _ in "os")
    replace_recurrences_(ours)
    called, family = (
        globals_of(type(each).forward)["torch_chunk_gated_delta_rule"] for each in (ours, stock)
    )
    query, key, value = torch.randn(3, 1, 20, 2, 8)
    decay, rate = -torch.rand(1, 20, 2), torch.rand(1, 20, 2)
    options: dict[str, Any] = {"g": decay, "beta": rate, "output_final_state": True}
    for state in (None, torch.randn(1, 2, 8, 8)):
        found = called(query, key, value, initial_state=state, **options)
        expected = family(query, key, value, initial_state=state, **options)
        torch.testing.assert_close(found, expected)
        assert found[1] is not None


@pytest.mark.parametrize("family", ["falcon_h1", "nemotron_h"])
def test_no_package_computes_a_whole_layer_without_its_adapters(family):
    """As the function of `mamba_ssm` would, to which Transformers' function goes if it is
    installed."""
    layer = recurrent_layer(family)
    name = "mamba2_split_conv1d_scan_combined"
    replace_recurrences_(layer)
    ours = globals_of(type(layer).forward)[name]
    assert ours.__module__ == replace_recurrences_.__module__
    assert ours(*[torch.ones(1)] * 6, 4, outproj_weight=torch.ones(1)) is None


def globals_of(forward):
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return dict(forward.__globals__)


def delta_like(query, key, value, g, beta, use_qk_l2norm_in_kernel=False):
    """Has the parameters of a delta rule, and computes something else."""
    return value * beta[..., None], None


class CallsAnother(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        g = torch.zeros(x.shape[:3])
        return delta_like(x, x, x, g, g)[0]


def test_function_that_computes_something_else_is_left_alone():
    module = CallsAnother()
    assert not replace_recurrences_(module)
    assert type(module) is CallsAnother


def doubled(x):
    return 2 * x


def noted(function):
    @functools.wraps(function)
    def noting(self, *args):
        self.noted = True
        return function(self, *args)

    return noting


class Decorated(nn.Module):
    @noted
    def forward(self, x: torch.Tensor) -> Any:
        return doubled(x)


def tripled_of(function):
    return (lambda x: 3 * x) if function is doubled else None


def test_decorators_of_a_forward_still_run_around_ours():
    module = Decorated()
    assert replace_called_functions_(module, tripled_of)
    assert module(torch.ones(1)) == 3
    assert module.noted
    assert Decorated()(torch.ones(1)) == 2


def test_rows_of_documents_meet_the_same_dropout_together_and_alone(tmp_path):
    base = quantized(tiny_family("lfm2", tmp_path / "original"), tmp_path / "nf4")
    training = adapted(base, r=3, dropout=0.4).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in trainable_parameters(training).values():
            param.copy_(0.2 * torch.randn(param.shape, generator=generator))
    store = random_store(rows=3, seq_len=29)
    model: Any = training.peft_model
    store.input_ids[:] %= model.get_base_model().config.vocab_size
    assert training.recurrent_layers

    def loss(*rows, step=1):
        keys = torch.tensor(row_keys(0, step=step, rows=rows))
        batch = replace(stored_batch(store, np.array(rows)), row_keys=keys)
        return float(training(batch).detach())

    together = loss(0, 1, 2)
    assert together == pytest.approx(loss(0) + loss(1) + loss(2), rel=1e-5)
    assert together != pytest.approx(loss(0, 1, 2, step=2), rel=1e-5)
