"""Which adapters' parts kernels add; that the node equals its linears: `tests/model/fusion`."""

from types import SimpleNamespace

import pytest
import torch

from workflow.lib.kernels.rows.gating import WIDEST_PART, LowRank, add_low_rank_
from workflow.lib.model.fused_feed_forward import Form, _kernels_add
from workflow.lib.model.layers.lora_matmul import Adapted
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
def test_kernels_add_parts_of_small_ranks_without_dora(ranks, factor, added):
    linears = [Adapted(None, torch.empty(r, 4), torch.empty(4, r), 1.0) for r in ranks]
    device = SimpleNamespace(type=RECORDED)  # where every kernel works
    x = SimpleNamespace(device=device, dtype=torch.bfloat16)
    assert _kernels_add(linears, x, [None, factor], FORM) is added


@pytest.mark.parametrize(("rank", "taken"), [(AT_MOST, True), (MORE, False)])
def test_wide_parts_of_sums_are_matmuls(rank, taken):
    part = LowRank(torch.empty(2, rank), torch.empty(rank, 4), 1.0)
    assert add_low_rank_.supports(torch.empty(2, 4), part) is taken
