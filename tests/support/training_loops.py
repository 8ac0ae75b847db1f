"""Settings of the short training loops that tests run, with their sizes."""

from pathlib import Path
from typing import Any

import torch

from tests.support.models import adapted, random_store
from workflow.lib.distributed.world import World
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.nf4_model import local
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.training.loop import Trainer, make_optimizer

STEPS, BATCH, ROWS, SEQ_LEN = 3, 6, 13, 31
CLIP = 0.05
LEARNING_RATE = 1e-2


def settings(*, dropout: float = 0.0, use_dora: bool = False, **train: Any) -> RunConfig:
    fixed = {"epochs": None, "max_steps": STEPS, "global_batch_size": BATCH, "weight_decay": 0.1}
    return RunConfig(
        lora=LoraSettings(r=4, alpha=8, dropout=dropout, use_dora=use_dora),
        train=TrainConfig(
            **(
                {"max_grad_norm": None, "learning_rate": LEARNING_RATE, "fused_layers": False}
                | fixed
                | train
            )
        ),
    )


def values_of(training: CausalLMForTraining) -> dict[str, torch.Tensor]:
    """Return copies of this process's slices of all trainable tensors."""
    params = trainable_parameters(training)
    return {name: local(param.detach()).clone() for name, param in params.items()}


def restart_(training: CausalLMForTraining, values: dict[str, torch.Tensor]) -> None:
    """Give a trained model the values that it had, so that it trains once more as if it were new:
    building another takes as long as several steps."""
    for name, param in trainable_parameters(training).items():
        local(param.detach()).copy_(values[name])
        param.grad = None


def trainer(
    training: CausalLMForTraining,
    config: RunConfig,
    world: World,
    *,
    micro_batch_size: int,
    graphs: Any = None,
    kind: type[Trainer] = Trainer,
) -> Trainer:
    optimizer = make_optimizer(training, config.train)
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    return kind.over(training, optimizer, store, config.train, micro_batch_size, world, graphs)


def loop(base: Path, world: Any, *, fill: float) -> Any:
    """Return the generator of `steps` over a fresh model whose adapter holds `fill`."""
    config = settings()
    training = adapted(base, r=4)
    for param in trainable_parameters(training).values():
        param.data.fill_(fill)
    return trainer(training, config, world, micro_batch_size=3).steps(first_step=0, num_steps=STEPS)
