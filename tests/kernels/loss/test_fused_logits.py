"""When kernels compute the loss, and what they are compared with before. The kernels themselves:
`tests/gpu/test_loss.py`."""

import pytest
import torch

from workflow.lib.kernels.loss import fused_logits
from workflow.lib.kernels.loss.fused_logits import LogitForm, usable


@pytest.mark.parametrize(
    "form", [LogitForm(1.0, None), LogitForm(0.25, None), LogitForm(2.0, 5.0)], ids=str
)
def test_what_kernels_are_compared_with_is_autograds(form):
    raw_logits = 4 * torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    columns = torch.tensor([7, 49, 0])
    leaf = raw_logits.requires_grad_()
    logits = leaf * form.scale
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    loss = torch.nn.functional.cross_entropy(logits, columns, reduction="sum")
    loss.backward()
    with torch.no_grad():
        log_sums, chosen, slopes = fused_logits._by_torch(raw_logits, columns, form)
    torch.testing.assert_close((log_sums - chosen).sum(), loss)
    torch.testing.assert_close(slopes, leaf.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cpus_take_torchs_operations(dtype):
    assert not usable(torch.zeros(1, dtype=dtype), LogitForm(1.0, None))
