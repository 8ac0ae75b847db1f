"""NVIDIA's driver of a host with eight cards, for programs started with this folder in
PYTHONPATH."""

from types import SimpleNamespace


class NVMLError(Exception):
    """As in the real module."""


nvmlMemory_v2 = 2  # noqa: N816 - the real module's name


def nvmlInit() -> None:  # noqa: N802
    """Succeed: there is a driver."""


def nvmlShutdown() -> None:  # noqa: N802
    """Do nothing."""


def nvmlDeviceGetCount() -> int:  # noqa: N802
    """Return the number of cards."""
    return 8


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    return index


def nvmlDeviceGetUUID(handle: int) -> str:  # noqa: N802
    """Return a card's UUID."""
    return f"GPU-{handle}"


def nvmlDeviceGetName(handle: int) -> str:  # noqa: N802
    """Return a model that the workflow knows."""
    return "NVIDIA A100-SXM4-40GB"


def nvmlDeviceGetMemoryInfo(handle: int, version: int) -> SimpleNamespace:  # noqa: N802
    """Return the memory of an idle card."""
    return SimpleNamespace(total=40 * 2**30, reserved=0, used=0)


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> int:  # noqa: N802
    """Return millijoules."""
    return 1000 * (handle + 1)


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:  # noqa: N802
    return 9, 0


def nvmlDeviceGetMaxMigDeviceCount(handle: int) -> int:  # noqa: N802
    """Return 0: no card is split."""
    return 0
