"""Which kernels a process uses: outcomes of its trials, and the decision of all processes."""

import logging
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

logger = logging.getLogger("workflow")


class Key(NamedTuple):
    """What is tried: an op's name, and what its kernel is compiled for."""

    name: str
    variant: tuple[Hashable, ...]


class Decision:
    """Of one process."""

    def __init__(self) -> None:
        self._outcomes: dict[tuple[Key, torch.device], bool] = {}
        self.faults: dict[Key, str] = {}
        """Kernels that are not used, and why."""

    def allows(self, key: Key, device: torch.device, fault: Callable[[], str | None]) -> bool:
        """Whether a kernel is used on a device. fault: tries it, and returns why not."""
        allowed = self._outcomes.get((key, device))
        if allowed is None:
            allowed = key not in self.faults and self._is_right(key, fault())
            self._outcomes[key, device] = allowed
        return allowed

    def _is_right(self, key: Key, fault: str | None) -> bool:
        if fault is None:
            return True
        if fault not in self.faults.values():  # what concerns all kernels is said once
            logger.warning("The kernel for %s is not used: %s.", key.name, fault)
        self.faults[key] = fault
        return False

    def adopt(self, faults: dict[Key, str]) -> None:
        """Do without these kernels, too. faults: of all processes."""
        for key in faults.keys() - self.faults.keys():
            reason = f"on another process: {faults[key]}"
            logger.warning("The kernel for %s is not used: %s.", key.name, reason)
        self.faults = faults
        self._outcomes = {k: right and k[0] not in faults for k, right in self._outcomes.items()}


DECISION = Decision()
