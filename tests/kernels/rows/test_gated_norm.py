"""Gated norms without GPU kernels, which `test_kernels` tries, and which classes of families are
such norms."""

import pytest
import torch
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from tests.kernels.recurrences.test_recurrences import saved_by
from workflow.lib.kernels.rows.gated_norm import GatedNorm
from workflow.lib.model.fusion.fuse_layers import as_gated_norm

WIDTH = 24
# In early versions of Transformers it is Zamba's.
NORMS = ("NemotronHRMSNormGated", "Zamba2RMSNormGated")
NEMOTRON_H = next(getattr(nemotron_h, name) for name in NORMS if hasattr(nemotron_h, name))
CLASSES = {
    "qwen3_5": (Qwen3_5RMSNormGated(WIDTH), 1, False),
    "nemotron_h": (NEMOTRON_H(WIDTH, group_size=8), 3, True),
    "falcon_h1, gate first": (FalconH1RMSNormGated(WIDTH, 1e-3, 2, False), 2, True),
    "falcon_h1, norm first": (FalconH1RMSNormGated(WIDTH, 1e-3, 4, True), 4, False),
}


@pytest.mark.parametrize("name", CLASSES)
def test_families_norms_are_known_and_computed(name):
    family, groups, gate_first = CLASSES[name]
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        family.weight.copy_(torch.rand(WIDTH, generator=draw))
    ours = as_gated_norm(family)
    assert (ours.groups, ours.gate_first) == (groups, gate_first)
    assert ours.weight is family.weight
    given = [torch.randn(2, 5, WIDTH, generator=draw).requires_grad_() for _ in "xg"]
    found, expected = ours(*given), family(*given)
    torch.testing.assert_close(found, expected)
    slope = torch.randn(found.shape, generator=draw)
    torch.testing.assert_close(
        torch.autograd.grad(found, given, slope), torch.autograd.grad(expected, given, slope)
    )


def test_inputs_are_kept_and_nothing_else():
    norm = GatedNorm(nn.Parameter(torch.rand(8)), eps=1e-6, groups=2, gate_first=True)
    given = [torch.randn(3, 8).bfloat16().requires_grad_() for _ in "xg"]
    saved = saved_by(lambda: norm(*given))
    assert norm(*given).dtype == torch.bfloat16
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in given]


class Squared(Qwen3_5RMSNormGated):
    """Has the parameters of such a norm, and gates by something else."""

    def forward(self, hidden_states, gate):
        return super().forward(hidden_states, gate) * gate


@pytest.mark.parametrize("module", [Squared(WIDTH), nn.Linear(WIDTH, 1, bias=False)], ids=str)
def test_other_modules_are_left_alone(module):
    assert as_gated_norm(module) is None
