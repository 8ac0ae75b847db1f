"""Settings of the live view of a training."""

from typing import Annotated, ClassVar

from pydantic import Field

from workflow.lib.settings.section_base import Affects, Section

Project = Annotated[str, Field(min_length=1, max_length=128)]


class TrackingConfig(Section):
    """What shows a run while it trains."""

    affects: ClassVar = Affects("none", stages=("finetune",))

    tensorboard: bool = True
    """Write TensorBoard files to `results/tensorboard/<run>/`."""
    wandb_project: Project | None = None
    """Weights & Biases project for curves and settings (`envs/wandb.txt`; WANDB_API_KEY in the
    environment); null = nothing is sent."""
    mlflow_experiment: Project | None = None
    """MLflow experiment for the same data (`envs/mlflow.txt`), at MLFLOW_TRACKING_URI, else in
    `results/mlflow/mlflow.db`; null = none."""
    trackio_project: Project | None = None
    """Trackio project for the same data (`envs/trackio.txt`), in TRACKIO_DIR, else in
    `results/trackio/`; null = none."""
