"""Rows that two GPUs share: steps in bf16 are as near to those in fp32 as steps of one GPU."""

import pytest
import torch

from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.gathering import all_full
from tests.support.models import base_fixture
from tests.support.plans import make_plan
from tests.support.rounding import lost
from tests.support.training_loops import settings, trainer
from workflow.lib.model.lora import trainable_parameters

pytestmark = pytest.mark.gpu

# Heads of a width that FlashAttention has; nine of them over two GPUs are 5 and 4.
base = base_fixture(
    hidden_size=576, intermediate_size=768, num_attention_heads=9, num_key_value_heads=3
)
FACTOR = 4.0  # of what one GPU loses by bf16 in a gradient
PATHS = {
    "recomputed": {},
    "kept, fused, in tiles, dropout": {"activation_checkpointing": False, "tile_tokens": 7},
    "activations in host memory": {"offload_activations": True, "offload_window_bytes": 2**15},
}


def step(world, base, attention, dtype, path):
    """Return the loss and the gradients of a first step of six rows of 31 tokens."""
    fused = "fused" in path
    config = settings(fused_layers=fused, dropout=0.3 if fused else 0.0, max_steps=1)
    plan = make_plan(device="cuda", processes=world.size, **PATHS[path])
    model = built_model(base, config, plan, world, dtype=dtype, attention=attention)
    params, gradients = trainable_parameters(model.training), {}
    for name, param in params.items():
        if ".lora_B." in name:  # else those of lora_A have no gradient
            torch.nn.init.constant_(param, 0.03)
    made = trainer(model.training, config, world, micro_batch_size=1)

    def keep(*_):
        gradients.update(all_full({name: param.grad for name, param in params.items()}))

    made.optimizer.register_step_pre_hook(keep)
    (metrics,) = made.steps(first_step=0, num_steps=1)
    return metrics.loss, {name: x.cpu() for name, x in gradients.items()}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("attention", ["varlen", "flex"])
def test_two_gpus_share_rows(base, attention, path):
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    alone, two = {"world_size": 1}, {"world_size": 2, "context_parallel": 2}
    (exact, rounded, shared) = (
        run_in_group(step, base, kernels, dtype, path, device="cuda", **processes)[0]
        for kernels, dtype, processes in (
            ("flex", torch.float32, alone),
            (attention, torch.bfloat16, alone),
            (attention, torch.bfloat16, two),
        )
    )
    assert shared[0] == pytest.approx(
        exact[0], rel=max(1e-3, FACTOR * abs(rounded[0] / exact[0] - 1))
    )
    for name, gradient in exact[1].items():
        bound = max(1e-2, FACTOR * lost(rounded[1][name], gradient))
        assert lost(shared[1][name], gradient) <= bound, name
