"""Families change values in place (OLMo clips its queries): the gradient is that of the changed
value, whatever a node of ours keeps."""

import importlib

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from tests.support.families import SIZES, tiny_family, tiny_model
from tests.support.family_runs import attention_of, family_store, randomize_
from tests.support.models import adapted, quantized
from tests.support.rounding import assert_rounded
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.tried_classes.magnitudes import changes_in_place
from workflow.lib.training.batches import stored_batch

FAMILIES = ("phi3", "qwen3_5_text", "falcon_h1", "qwen3_moe", "stablelm")


def nodes():
    """The library's autograd nodes, of modules that are loaded."""
    return [x for x in _below(torch.autograd.Function) if x.__module__.startswith("workflow.lib")]


def _below(kind):
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


def training_of(base, **lora):
    training = adapted(base, attention=attention_of(base), fused_layers=True, r=3, **lora).train()
    randomize_(training)
    return training


def loss_of(training):
    loss: torch.Tensor = training(stored_batch(family_store("packed"), np.arange(2)))
    return loss


def gradients(training, loss=None):
    (loss_of(training) if loss is None else loss).backward()
    found = {name: p.grad for name, p in trainable_parameters(training).items()}
    training.zero_grad()
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_all_nodes_may_be_changed_in_place(family, tmp_path, monkeypatch):
    """Of those that have memory of their own: no placeholder has."""
    base = quantized(tiny_family(family, tmp_path / "original"), tmp_path / "nf4")
    training, changed = training_of(base), set()
    expected = gradients(training)

    def changing(node, apply):
        def applied(*args):
            made = apply(*args)
            for x in made if isinstance(made, tuple) else (made,):
                if x.requires_grad and 0 not in x.stride():
                    x.mul_(1.0)
                    changed.add(node)
            return made

        return staticmethod(applied)

    with monkeypatch.context() as patched:
        for node in nodes():
            patched.setattr(node, "apply", changing(node, node.apply))
        loss = loss_of(training)
    torch.testing.assert_close(gradients(training, loss), expected, rtol=0, atol=0)
    assert len(changed) >= 3


def test_gradient_of_doras_magnitudes_is_that_of_clipped_values(tmp_path):
    """OLMo's, whose nodes keep values; by linears that give clipped values to a model without."""
    config = AutoConfig.for_model("olmo", **(SIZES | {"clip_qkv": 0.5}))
    base = quantized(tiny_model(config, tmp_path / "original"), tmp_path / "nf4")
    training = training_of(base, use_dora=True)
    found = gradients(training)
    training.peft_model.get_base_model().config.clip_qkv = None
    for name, module in training.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            module.register_forward_hook(lambda _, __, y: y.clamp(-0.5, 0.5))
    assert any("magnitude" in name for name in found)
    assert_rounded(found, gradients(training))


@pytest.mark.parametrize(
    ("family", "kind", "expected"),
    [
        ("olmoe", "OlmoeAttention", True),  # a method of tensors
        ("falcon", "FalconDecoderLayer", True),  # an augmented assignment
        ("llama", "LlamaDecoderLayer", False),
        ("qwen3_next", "Qwen3NextDecoderLayer", False),
    ],
)
def test_changes_in_place_are_found_in_a_familys_code(family, kind, expected):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert changes_in_place(getattr(module, kind)) is expected
