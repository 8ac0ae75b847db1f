"""GPU tests skip where there are too few GPUs."""

import pytest
import torch

from workflow.lib.kernels.nf4.decode import dequantize_nf4


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


@pytest.fixture
def kernels_run():
    """Needs a GPU and Triton: a machine of ours without them is set up wrongly."""
    require(1)
    assert dequantize_nf4.works_on(torch.device("cuda", 0), torch.bfloat16)


def require(needed):
    """Return `needed`; skip the test where this machine has fewer GPUs."""
    count = torch.cuda.device_count()
    if count < needed:
        pytest.skip(f"needs {needed} GPUs, this machine shows {count}")
    return needed
