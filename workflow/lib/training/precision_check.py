"""What matmuls in float8 cost the base, measured before the first step of a run that has them.

Adapters change nothing yet, so the loss is the base's, and the rows of the data are as new to it as
held-out ones are. Matmuls in backward change no loss: `docs/numerics.md` says what they were
measured to do."""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.distributed as dist

from workflow.lib.artifacts.training_record import Check
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.distributed.world import World
from workflow.lib.kernels.eight_bits.rounding import Format
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.objectives.next_token import NEXT_TOKEN
from workflow.lib.settings.config import TrainConfig
from workflow.lib.system.compute_choice import COMPUTE_DTYPE
from workflow.lib.system.errors import setting_error
from workflow.lib.training.batches import stored_batch

logger = logging.getLogger("workflow")

# Of SmolLM2-135M float8 moves the loss of a token by 0.2 nats up or down: their mean by 0.002.
TOKENS = 8192


def check_precision(
    training: CausalLMForTraining,
    store: TokenStore,
    train: TrainConfig,
    world: World,
    *,
    moved: Callable[[], None] = lambda: None,
) -> list[Check]:
    """Compare the base's loss with matmuls in 8 bits and without; return the report's check, none
    for a run without. Calls `moved` after every row. Collective. With `auto` a rise above the bound
    switches 8 bits off; else it raises `UserError`."""
    forward, backward = training.matmul_precision.asked
    if forward is None and backward is None:
        return []
    if forward is None:
        assert backward is not None
        detail = f"only gradients are in {backward.name}"
        return [_check("matmuls in 8 bits are in backward alone", detail)]
    training.eval()
    plain, rounded = (
        _loss(training, store, world, precision, moved=moved)
        for precision in (nullcontext(), training.matmul_precision.in_eight_bits())
    )
    return [_judged(training, train, forward, plain=plain, rounded=rounded)]


def _judged(
    training: CausalLMForTraining, train: TrainConfig, form: Format, *, plain: float, rounded: float
) -> Check:
    """Return the check of both losses, nats per trained token, or end the run."""
    bound = train.max_matmul_loss_rise
    detail = (
        f"{plain:.4f} nats per token in the compute dtype, {rounded:.4f} in {form.name}; allowed "
        f"is a rise of {bound:g}"
    )
    if rounded - plain <= bound:
        logger.info("matmuls of frozen weights in %s: %s", form.name, detail)
        return _check("the base's loss in 8 bits is that of the compute dtype", detail)
    if train.matmul_dtype != "auto":
        change = (
            f"Set it to {COMPUTE_DTYPE}, set train.matmul_passes to backward, or raise "
            "train.max_matmul_loss_rise"
        )
        raise setting_error(
            "train.matmul_dtype", train.matmul_dtype, f"the base has {detail}", change
        )
    training.multiply_in_(COMPUTE_DTYPE, train.matmul_passes)
    logger.warning("train.matmul_dtype = auto: no matmuls in 8 bits, since the base has %s", detail)
    return _check("matmuls in 8 bits are off where they cost the base more than allowed", detail)


def _check(name: str, detail: str) -> Check:
    return Check(name=name, passed=True, detail=detail)


def _loss(
    training: CausalLMForTraining,
    store: TokenStore,
    world: World,
    precision: AbstractContextManager[None],
    *,
    moved: Callable[[], None],
) -> float:
    """Return the mean loss of a trained token of the first rows, those of each process in turn,
    whatever the objective. Collective."""
    objective, training.objective = training.objective, NEXT_TOKEN
    count = math.ceil(TOKENS / store.seq_len / world.size)
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    with forward_only(training), precision:
        for number in range(world.rank, count * world.size, world.size):
            row = np.array([number % store.num_rows])
            total[0] += training(stored_batch(store, row).to(world.device))
            total[1] += NEXT_TOKEN.step_sizes(store, row)[0]
            moved()
    training.objective = objective
    dist.all_reduce(total)
    return float(total[0] / total[1])
