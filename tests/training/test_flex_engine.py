"""Flex attention within the engine: sharded layers, recomputation, activations in host memory, the
rotation by our operation; against the family's eager attention in the plain engine."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.built_models import built_model
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.gathering import all_full
from tests.support.models import quantized, random_store, tiny_gemma2
from tests.support.plans import make_plan
from tests.support.rounding import assert_rounded
from workflow.lib.distributed.world import process_group
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.nf4_model import local
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.training.batches import stored_batch

LAYERS = 2
PLAIN: dict[str, Any] = {"activation_checkpointing": False}
LEVERS: dict[str, dict[str, Any]] = {
    "recomputation": {"activation_checkpointing": True},
    "activations in host memory": {
        "activation_checkpointing": False,
        "offload_activations": True,
        "offload_window_bytes": 4096,
    },
    "both": {
        "activation_checkpointing": 2,
        "offload_activations": True,
        "offload_window_bytes": 4096,
    },
}


def step(base, world, *, attention, fused, lever):
    """Return the summed loss and the adapters' gradients of one micro-batch of two rows, which all
    processes share."""
    config = RunConfig(lora=LoraSettings(r=2), train=TrainConfig(fused_layers=fused))
    model = built_model(
        base,
        config,
        make_plan(processes=world.size, micro_batch_size=2, **lever),
        world,
        dtype=torch.float32,
        attention=attention,
    )
    store = random_store(rows=2, seq_len=37, seed=3)
    store.input_ids[:] %= 101
    parameters = trainable_parameters(model.training)
    for number, (name, parameter) in enumerate(sorted(parameters.items())):
        if "lora_B" in name:  # zeros, which would leave A without a gradient
            local(parameter).data.fill_(0.01 * (number % 7 - 3))
    loss = model.training(stored_batch(store, np.arange(2)).to(world.device))
    loss.backward()
    return {
        "loss": loss.detach(),
        "gradients": all_full({name: p.grad for name, p in parameters.items()}),
        "rotated": model.fused["rotations"],
    }


def steps(base):
    """Return the step by the family's eager attention in the plain engine, if this process is
    alone, and by flex with each lever."""
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        found = {}
        if world.size == 1:
            found["eager"] = step(base, world, attention="eager", fused=False, lever=PLAIN)
        for name, lever in LEVERS.items():
            found[name] = step(base, world, attention="flex", fused=True, lever=lever)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma2")
    source = tiny_gemma2(
        folder / "original",
        num_hidden_layers=LAYERS,
        attn_logit_softcapping=0.5,
        initializer_range=0.3,
    )
    return quantized(source, folder / "nf4")


@pytest.fixture(scope="module")
def by_processes(base):
    return {n: run_distributed(steps, base, world_size=n) for n in (1, 2)}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("lever", LEVERS)
def test_flex_attention_in_the_engine_is_the_familys_eager(by_processes, lever, processes):
    expected = by_processes[1][0]["eager"]
    for process in by_processes[processes]:
        found = process[lever]
        assert found["rotated"] == LAYERS
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-5, atol=0)
        # every process has the same rows, and gradients are summed
        assert found["gradients"].keys() == expected["gradients"].keys()
        felt = {name: x for name, x in expected["gradients"].items() if x.any()}  # B is 0 at first
        assert_rounded({name: found["gradients"][name] / processes for name in felt}, felt)
