"""Section `sweep`: the rungs at which runs of a sweep end early."""

from itertools import pairwise
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from workflow.lib.settings.effects import Affects
from workflow.lib.settings.section_base import Section


class SweepConfig(Section):
    """Runs that end early."""

    affects: ClassVar = Affects("result", read_by=("decide_rung",), told=("render_report",))

    rungs: tuple[Annotated[int, Field(ge=1, le=10**9)], ...] = ()
    """Optimizer steps after which the held-out loss decides which runs continue; the last is every
    run's `train.max_steps`. [] = all runs train to the end."""
    keep: float = Field(1.0, gt=0.0, le=1.0)
    """Largest share of runs that continue after a rung (those with the lowest losses, rounded up);
    1 = only the interval decides."""

    @model_validator(mode="after")
    def _rungs_rise(self) -> "SweepConfig":
        if not self.rungs and self.keep != 1.0:
            raise ValueError(
                f"keep = {self.keep:g}: without rungs it decides nothing. Remove it, or set rungs"
            )
        if len(self.rungs) == 1:
            raise ValueError(
                f"rungs = {list(self.rungs)}: the last rung is the end of the training, so one "
                "alone decides nothing. Put a smaller number of steps before it"
            )
        for before, after in pairwise(self.rungs):
            if after <= before:
                raise ValueError(
                    f"rungs = {list(self.rungs)}: {after} does not rise above {before}. Sort the "
                    "numbers of steps, each once"
                )
        return self
