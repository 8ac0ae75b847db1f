"""GPU tests skip where there are too few GPUs."""

import pytest
import torch


@pytest.fixture(scope="session")
def one_gpu():
    """Return 1, the GPU that the test needs."""
    return require(1)


@pytest.fixture(scope="session")
def two_gpus():
    """Return 2, the GPUs that the test needs."""
    return require(2)


@pytest.fixture
def enough_gpus(processes):
    """Return the GPUs that the test needs: one for each of its `processes`."""
    return require(processes)


def require(needed):
    """Return `needed`; skip the test where this machine has fewer GPUs."""
    count = torch.cuda.device_count()
    if count < needed:
        pytest.skip(f"needs {needed} GPUs, this machine shows {count}")
    return needed
