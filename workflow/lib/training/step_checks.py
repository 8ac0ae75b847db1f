"""Checks of each step: training that has diverged, and training that learns nothing."""

import logging
import math

from workflow.lib.system.errors import UserError

logger = logging.getLogger("workflow")

STANDSTILL_STEPS = 20


class Standstill:
    """Warns once if the gradient has been 0 for `STANDSTILL_STEPS` steps."""

    def __init__(self) -> None:
        self._steps, self._warned = 0, False

    def note(self, grad_norm: float, *, step: int) -> None:
        self._steps = self._steps + 1 if grad_norm == 0.0 else 0
        if self._steps < STANDSTILL_STEPS or self._warned:
            return
        self._warned = True
        logger.warning(
            "the gradient has been exactly 0 in %d steps, up to step %d: nothing is learned. If "
            "the loss is as low as wanted, end the run; if not, check the weights of tokens and "
            "answers, and preferences.loss_type",
            *(self._steps, step + 1),
        )


def check_step(
    loss: float,
    norm: float,
    *,
    step: int,
    origin: str | None = None,
    may_stand_still: bool = False,
) -> None:
    """Raise `UserError` if a loss or gradient norm is not finite, or if the gradient is 0 where the
    objective has one; origin: where it arose; may_stand_still: as `Objective` says."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise UserError(
            f"step {step + 1}: loss = {loss}, gradient norm = {norm}: training has "
            f"diverged{f' ({origin})' if origin else ''}. Lower train.learning_rate, raise "
            "train.warmup_share, or set train.max_grad_norm; the last checkpoint is kept."
        )
    if norm == 0.0 and not may_stand_still:
        # Adapters begin with gradients; later ones vanish if an update has saturated the model.
        causes = {
            True: "nothing is being learned. Check that the rows have trained tokens "
            "(data.loss_on).",
            False: "the updates have broken the model. Lower train.learning_rate or lora.alpha, "
            "or set train.max_grad_norm; the last checkpoint is kept.",
        }
        raise UserError(
            f"step {step + 1}: the gradient norm is exactly 0 (loss = {loss}): {causes[step == 0]}"
        )
