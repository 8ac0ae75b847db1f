"""A row of the table of memory options: what is known of an option besides the engine's code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from workflow.lib.step_plan.base_plan import BasePlan
from workflow.lib.system.errors import setting_error

Value = bool | int | float | str


class Circumstances(NamedTuple):
    """What options ask of a machine and a model."""

    cuda: bool
    processes: int
    num_layers: int
    tied_embeddings: bool
    embedding: str  # path of the embedding


class Obstacle(NamedTuple):
    """Why an option cannot be, naming what forbids it, and what to change."""

    reason: str
    change: str


def _nothing(plan: BasePlan, value: Value, where: Circumstances) -> Obstacle | None:
    return None


@dataclass(frozen=True)
class MemoryOption:
    """A row: what is known of an option besides the engine's code."""

    field: str  # of `MemoryOptions`
    setting: str
    off: Value  # without the option
    most: Value | None = None  # what saves most memory, which a remedy names; None: it is no remedy
    first: Value | None = None  # what the search begins with; None: `off`
    automatic: Callable[[BasePlan, Circumstances], Value] | None = None
    """What `auto` means; None: the search decides."""
    tried: Callable[[Circumstances], Sequence[Value]] | None = None
    """What the search tries for `auto`; None: nothing else."""
    fewest: bool = False  # counts layers, of which the search takes as few as let a plan fit
    obstacle: Callable[[BasePlan, Value, Circumstances], Obstacle | None] = _nothing
    left_out: bool = False
    """On by default: where there is an obstacle it is left out, and others are refused."""
    rounds: bool = False  # the result differs by rounding
    on_host: bool = False  # takes page-locked host memory
    frees_gathered: bool = False  # without it, gathered weights stay on the GPUs
    needless: Callable[[Any], bool] = lambda plan: False
    """Whether a plan does the same as another one that the search tries."""
    title: str = ""
    """Of `words`; of several rows the words stand together. Empty: a plan's words leave it out."""
    words: Callable[[Any], str] = str  # how a value is said; empty: not at all

    @property
    def begins(self) -> Value:
        return self.off if self.first is None else self.first

    @property
    def searched(self) -> bool:
        """Whether preflight may decide it."""
        return self.tried is not None or self.fewest

    def of(self, plan: BasePlan) -> Any:
        """Return a plan's value."""
        return getattr(plan, self.field)

    def settled(self, wanted: Value, plan: BasePlan, where: Circumstances) -> Value:
        """Return what a setting means for a plan before the search, or raise `UserError`."""
        if wanted == "auto":
            return self.begins if self.automatic is None else self.automatic(plan, where)
        found = None if wanted == self.off else self.obstacle(plan, wanted, where)
        if found is None:
            return wanted
        if self.left_out:
            return self.off
        raise setting_error(self.setting, wanted, *found)

    def open_values(self, wanted: Value, where: Circumstances) -> Sequence[Value]:
        """Return what the search tries; empty where it has no choice."""
        return self.tried(where) if wanted == "auto" and self.tried is not None else ()
