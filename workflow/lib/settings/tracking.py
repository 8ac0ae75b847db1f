"""Settings of the live view of a training."""

from typing import ClassVar

from pydantic import Field

from workflow.lib.settings.effects import Affects
from workflow.lib.settings.section_base import Section


class TrackingConfig(Section):
    """What shows a run while it trains."""

    affects: ClassVar = Affects("none", read_by=("finetune",))

    tensorboard: bool = True
    """Write TensorBoard files to `results/tensorboard/<run>/`."""
    wandb_project: str | None = Field(None, min_length=1, max_length=128)
    """Weights & Biases project for curves and settings (`envs/wandb.txt`; WANDB_API_KEY in the
    environment); null = nothing is sent."""
