"""The reference `start` of preferences: the training module itself, with the values it began with.

So it has the precision, the kernels and the rows of the trained model, and before the first update
every log-ratio is exactly 0. The start values are in host memory; a pass swaps them in, and the
current ones back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.nf4_model import local
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.objectives.objective import NEXT_TOKEN, Objective, TokenLosses


def token_losses(
    training: CausalLMForTraining, batches: Iterable[MicroBatch], objective: Objective
) -> list[torch.Tensor]:
    """Return the objective's loss (n,) fp32 of each micro-batch's trained tokens, without dropout.
    Collective: all processes have equally many."""
    was_training = training.training
    training.eval()
    with (
        training.with_objective(TokenLosses(objective)),
        forward_only(training),
        training.adapters.unchanged(),
    ):
        losses = [training(batch)[1:] for batch in batches]
    training.train(was_training)
    return losses


class StartReference:
    """This process's slices of the trained parameters at the start of the run."""

    def __init__(self, training: nn.Module) -> None:
        self._values = {
            name: _on_host(local(param.detach()))
            for name, param in trainable_parameters(training).items()
        }
        self._step: object = None
        self._step_log_probs: list[torch.Tensor] = []

    def log_probs(
        self, training: CausalLMForTraining, batches: Iterable[MicroBatch]
    ) -> list[torch.Tensor]:
        """Return log p (n,) fp32 of each micro-batch's trained tokens by the start. Collective."""
        with self._swapped(training):
            return [-losses for losses in token_losses(training, batches, NEXT_TOKEN)]

    def step_log_probs(
        self,
        training: CausalLMForTraining,
        step: object,
        batches: Callable[[], Iterable[MicroBatch]],
    ) -> list[torch.Tensor]:
        """Return `log_probs` of the micro-batches of a step (by identity), computed once.
        Collective."""
        if self._step is not step:
            self._step, self._step_log_probs = step, self.log_probs(training, batches())
        return self._step_log_probs

    @contextmanager
    def _swapped(self, training: nn.Module) -> Iterator[None]:
        """Within the block the trained parameters have their start values."""
        params = {name: local(p.detach()) for name, p in trainable_parameters(training).items()}
        current = {name: param.clone() for name, param in params.items()}
        for name, param in params.items():
            param.copy_(self._values[name], non_blocking=True)
        try:
            yield
        finally:
            for name, param in params.items():
                param.copy_(current[name])


def _on_host(values: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory; of a GPU's values in page-locked memory, which the GPU reads
    while Python launches the pass: else it waits for the GPU, then the GPU for each launch."""
    copy = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
    return copy.copy_(values)


def with_references(
    batches: Iterable[MicroBatch], references: Iterable[torch.Tensor]
) -> Iterator[MicroBatch]:
    """Yield micro-batches with the log-probabilities of their reference, beside those of another
    model."""
    for batch, reference in zip(batches, references, strict=True):
        yield replace(batch, reference=reference, scored=batch.reference)
