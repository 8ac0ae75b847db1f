"""Which adapters' parts kernels add; that the node equals its linears: `tests/model/fusion`."""

import pytest
import torch

from workflow.lib.kernels.rows.gating import WIDEST_PART, LowRank, add_low_rank_
from workflow.lib.model.fused_feed_forward import Form, _kernels_add
from workflow.lib.model.layers.lora_matmul import Adapted
from workflow.lib.recording.recorded_gpu import recorded_gpu
from workflow.lib.system.device_types import RECORDED

FORM = Form(("gate", "up"), "down", "silu")
AT_MOST, MORE = WIDEST_PART, WIDEST_PART + 1


@pytest.mark.parametrize(
    ("ranks", "factor", "added"),
    [
        ((16, AT_MOST, 8), None, True),
        ((MORE, 8, 8), None, False),
        ((8, 8, MORE), None, False),
        ((8, 8, 8), torch.ones(3), False),
    ],
)
def test_kernels_add_parts_of_small_ranks_without_dora(ranks, factor, added, gpu):
    linears = [Adapted(None, torch.empty(r, 4), torch.empty(4, r), 1.0) for r in ranks]
    assert _kernels_add(linears, gpu, [None, factor], FORM) is added


def test_wide_parts_of_sums_are_matmuls(gpu):
    for rank, taken in ((AT_MOST, True), (MORE, False)):
        part = LowRank(torch.empty(2, rank), torch.empty(rank, 4), 1.0)
        assert add_low_rank_.takes_kernel(gpu, part) is taken


@pytest.fixture
def gpu():
    """A tensor as of a recorded GPU, where every kernel works."""
    recorded_gpu()
    return torch.empty(2, 4, dtype=torch.bfloat16, device=RECORDED)
