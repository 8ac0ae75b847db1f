"""GPU tests skip where there are too few GPUs."""

import pytest
import torch


@pytest.fixture
def two_gpus(request: pytest.FixtureRequest) -> int:
    """Return how many GPUs the test's `processes` need, 2 without."""
    callspec = getattr(request.node, "callspec", None)
    needed: int = callspec.params.get("processes", 2) if callspec else 2
    count = torch.cuda.device_count()
    if count < needed:
        pytest.skip(f"needs {needed} GPUs, this machine shows {count}")
    return needed
