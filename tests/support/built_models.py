"""A training model whose plan says what its settings do, as preflight's does."""

from dataclasses import replace
from pathlib import Path

import torch

from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.distributed.world import World
from workflow.lib.kernels.attention.attention_choice import FAMILY
from workflow.lib.settings.config import RunConfig
from workflow.lib.settings.objectives import reads_start
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.dtype_choice import COMPUTE_DTYPE
from workflow.lib.training.build import TrainingModel, build_training_model


def built_model(
    base: Path,
    config: RunConfig,
    plan: StepPlan,
    world: World,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    matmul_dtype: str = COMPUTE_DTYPE,
    start: Path | None = None,
) -> TrainingModel:
    """Build the model of a plan with what the settings say of its layers. Collective."""
    train = config.train
    asked = replace(
        plan,
        compute_dtype=str(dtype).removeprefix("torch."),
        attention=attention,
        attention_dropout=config.model.attention_dropout == FAMILY,
        matmul_dtype=matmul_dtype,
        matmul_passes=train.matmul_passes,
        fused_layers=train.fused_layers,
        fused_loss=train.fused_loss,
        start_reference=reads_start(train.objective, config.preferences),
    )
    return build_training_model(
        Checkpoint(base), config, asked, world, start=start and Adapter(start)
    )
