"""Runs of a tiny model that save checkpoints and are resumed from them."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tests.support.built_models import built_model
from tests.support.gathering import all_full
from tests.support.models import random_store
from tests.support.plans import make_plan
from workflow.lib.distributed.world import World
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.training.checkpoint import Resumed, resume_
from workflow.lib.training.loop import Trainer, make_optimizer

STEPS, SAVED = 3, 1
CONFIG = RunConfig(
    lora=LoraSettings(r=3, dropout=0.1),
    train=TrainConfig(
        epochs=None, max_steps=STEPS, global_batch_size=12, learning_rate=1e-2, weight_decay=0.1
    ),
)
IDENTITY = "0123456789ab-cdef01234567"


def whole_of(local: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded as another one is."""
    if not isinstance(like, DTensor):
        return local
    placed = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return DTensor.from_local(local, like.device_mesh, like.placements, **placed)


class Run:
    """A run in this process's group: a fresh model and optimizer, trained from `first_step` on."""

    def __init__(
        self, base: Path, world: World, config: RunConfig = CONFIG, micro_batch_size: int = 3
    ) -> None:
        self.world, self.config, self.micro_batch_size = world, config, micro_batch_size
        attention = "sdpa" if world.context is None else "flex"
        self.training = built_model(base, config, make_plan(), world, attention=attention).training
        self.optimizer = make_optimizer(self.training, config.train)

    def losses(self, *, first: int) -> Iterator[float]:
        loop = Trainer.over(
            self.training,
            self.optimizer,
            random_store(rows=13, seq_len=23),
            self.config.train,
            micro_batch_size=self.micro_batch_size,
            world=self.world,
        ).steps(first_step=first, num_steps=self.config.train.max_steps)
        return (step.loss for step in loop)

    def train(self, *, first: int, last: int = STEPS) -> list[float]:
        return list(islice(self.losses(first=first), last - first))

    def resume(self, folder: Path, *, identity: str = IDENTITY) -> Resumed:
        return resume_(folder, self.training, self.optimizer, identity=identity, world=self.world)

    def state(self) -> dict[str, torch.Tensor]:
        params = trainable_parameters(self.training)
        sharded = {**params}
        for name, param in params.items():
            for key, piece in self.optimizer.pieces(name, rank=self.world.rank).items():
                sharded[f"{name}.{key}"] = whole_of(piece.local, like=param)
        return all_full(sharded) | {"step": self.optimizer.count.clone()}
