"""Adapters that decoder layers gather in the compute dtype: what is computed of them, and the
float32 gradients of their masters."""

import pytest
import torch

from tests.distributed.test_vocabulary_parallel import batch_of, fill_
from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.plans import make_plan
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.config import LoraSettings, RunConfig
from workflow.lib.training.micro_batch_graphs import forward_backward

LORA = {"r": 3, "alpha": 1}  # a scale of a third: no matmul with it is one of bfloat16


def step(base, world, lora):
    """Two micro-batches in bfloat16, of whose rows the first process trains one and the others
    none: the gradients of the second, and the types in which layers see their adapters."""
    plan = make_plan(activation_checkpointing=2)
    training = built_model(base, RunConfig(lora=lora), plan, world, dtype=torch.bfloat16).training
    params = trainable_parameters(training)
    fill_(params)
    training.train()
    seen = watched(training)
    batch = batch_of(slice(world.rank, world.rank + 1), trained=world.rank == 0)
    forward_backward(training, batch, torch.ones(()))
    for param in params.values():
        param.grad = None
    forward_backward(training, batch, torch.ones(()))
    gradients = {name: param.grad for name, param in params.items()}
    return {
        "seen": seen,
        "masters": {param.dtype for param in params.values()},
        "gradients": {name: gradient.full_tensor() for name, gradient in gradients.items()},
    }


def watched(training):
    """Note the types of all trainable parameters of a layer while it computes."""
    seen = set()
    for layer in training.peft_model.get_base_model().get_decoder().layers:

        def note(_, __, layer=layer):
            seen.update(p.dtype for p in layer.parameters() if p.requires_grad)

        layer.mlp.register_forward_pre_hook(note)
    return seen


def survey(world, base):
    kinds = {"lora": LoraSettings(**LORA), "dora": LoraSettings(**LORA, use_dora=True)}
    return {name: step(base, world, lora) for name, lora in kinds.items()}


@pytest.fixture(scope="module")
def found(tiny_base):
    return run_in_group(survey, tiny_base, world_size=2)


def test_layers_see_adapters_in_the_compute_type(found):
    """DoRA's magnitudes stay in float32, and with them all."""
    for result in found:
        assert result["lora"]["seen"] == {torch.bfloat16}
        assert result["dora"]["seen"] == {torch.float32}
        assert result["lora"]["masters"] == {torch.float32}


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_gradients_are_never_rounded_to_the_compute_type(found, kind):
    """Those of B are multiplied by a scale of a third in float32, so two of three are no numbers
    of bfloat16; rounded ones all would be. The other process adds zeros."""
    for result in found:
        gradients = result[kind]["gradients"]
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        of_b = [gradient for name, gradient in gradients.items() if ".lora_B." in name]
        assert len(of_b) > 20
        for gradient in of_b:
            assert (gradient != gradient.bfloat16().float()).any()
