"""A run on a machine, as preflight asks about it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.preflight.budget import budget, certain_lack
from workflow.lib.planning.preflight.plan_search import Recorder
from workflow.lib.planning.preflight.planning_inputs import (
    divisors,
    plan_from_settings,
    shard_size,
)
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.settings.config import RunConfig
from workflow.lib.settings.train import MOST_SHARERS
from workflow.lib.system.errors import UserError


@dataclass(frozen=True)
class PlannedRun:
    """A run on a machine, and the recorder of its plans."""

    settings: RunConfig
    shape: ModelShape
    machine: Machine
    tokens: TokenCounts
    record: Recorder
    estimate: bool = False
    disk_free_bytes: int | None = None
    costs: Mapping[str, float] | None = None
    """Nats a token of each weight in 4 bits, for `quantize.keep: auto`."""

    def _changed(self, section: str, **values: Any) -> "PlannedRun":
        update = getattr(self.settings, section).model_copy(update=values)
        return replace(self, settings=self.settings.model_copy(update={section: update}))

    def in_16_bits(self) -> "PlannedRun":
        """Return the same run with all linears in 16 bits."""
        return self._changed("quantize", method="none", keep=())

    def with_rows_of(self, seq_len: int) -> "PlannedRun":
        """Return the same run with as many full rows of another length."""
        trained = self.tokens.packed_rows * seq_len
        tokens = replace(self.tokens, seq_len=seq_len, trained_tokens=trained, answer_rows=None)
        return replace(self._changed("data", seq_len=seq_len), tokens=tokens)

    def with_fewest_rows(self) -> "PlannedRun":
        """Return the same run with a row a micro-batch, if the search decides on its rows."""
        if self.settings.train.micro_batch_size != "auto":
            return self
        return self._changed("train", micro_batch_size=1)

    def with_rows_over(self, context_parallel: int) -> "PlannedRun":
        """Return the same run with rows that so many processes share."""
        return self._changed("hardware", context_parallel=context_parallel)

    def wider(self) -> Iterator["PlannedRun"]:
        """Yield the run with rows that 2 or more GPUs share, the fewest first, as far as no check
        refuses it: on CPUs fewer processes do."""
        if self.machine.device == "cpu" or self.too_large() is not None:
            return
        processes = self.machine.processes
        for number in divisors(shard_size(self.settings.hardware.shard_size, processes=processes)):
            if 1 < number <= MOST_SHARERS:
                run = self.with_rows_over(number)
                try:
                    plan_from_settings(run.settings, run.shape, run.machine)
                except UserError:  # more processes have the same obstacle
                    return
                yield run

    def too_large(self) -> str | None:
        """Why no plan can fit, without a recording; None if one might."""
        plan = plan_from_settings(self.settings, self.shape, self.machine)
        limits = budget(self.settings.hardware, self.machine)
        return certain_lack(self.shape, plan, self.machine, limits)
