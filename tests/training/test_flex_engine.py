"""Flex attention within the engine: sharded layers, recomputation, activations in host memory, the
rotation by our operation; against the family's eager attention in the plain engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.gathering import full
from tests.support.models import quantized, random_store, tiny_gemma2
from tests.support.plans import make_plan
from workflow.lib.distributed.world import process_group
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.training.batches import stored_batch
from workflow.lib.training.build import Numerics, build_training_model

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


def step(base: Path, attention: str, fused: bool, lever: dict[str, Any]) -> dict[str, Any]:
    """Return the summed loss and the adapters' gradients of one micro-batch of two rows, which all
    processes share.
    """
    config = RunConfig(lora=LoraSettings(r=2), train=TrainConfig(fused_layers=fused))
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        model = build_training_model(
            base,
            config,
            make_plan(processes=world.size, micro_batch_size=2, **lever),
            world,
            numerics=Numerics(torch.float32, attention),
        )
        store = random_store(rows=2, seq_len=37, seed=3)
        store.input_ids[:] %= 101
        parameters = trainable_parameters(model.training)
        for number, (name, parameter) in enumerate(sorted(parameters.items())):
            if "lora_B" in name:  # zeros, which would leave A without a gradient
                torch.manual_seed(number)
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.data.fill_(0.01 * (number % 7 - 3))
        loss = model.training(stored_batch(store, np.arange(2)).to(world.device))
        loss.backward()
        return {
            "loss": loss.detach(),
            "gradients": {name: full(p.grad) for name, p in parameters.items()},
            "rotated": model.fused["rotations"],
        }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma2")
    source = tiny_gemma2(folder / "original", attn_logit_softcapping=0.5, initializer_range=0.3)
    return quantized(source, folder / "nf4")


@pytest.fixture(scope="module")
def expected(base: Path) -> dict[str, Any]:
    return run_distributed(step, base, "eager", False, PLAIN, world_size=1)[0]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("lever", LEVERS)
def test_flex_attention_in_the_engine_is_the_familys_eager(
    base: Path, expected: dict[str, Any], lever: str, processes: int
) -> None:
    for found in run_distributed(step, base, "flex", True, LEVERS[lever], world_size=processes):
        assert found["rotated"] == 3
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-5, atol=0)
        for name, gradient in found["gradients"].items():
            one = expected["gradients"][name]
            rounding = 1e-5 * float(one.abs().max())
            # every process has the same rows, and gradients are summed
            torch.testing.assert_close(gradient / processes, one, rtol=1e-4, atol=rounding)
