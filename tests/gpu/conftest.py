"""GPU tests skip where there are too few GPUs; `num_gpus` is how many there are."""

import pytest
import torch


@pytest.fixture(scope="session")
def two_gpus() -> int:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs 2 GPUs, this machine shows {count}")
    return 2
