"""The loss on a GPU: its kernels against autograd, and against the loss without them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from workflow.lib.kernels.loss.fused_logits import (
    ELSEWHERE,
    IGNORED,
    FusedLogits,
    LogitForm,
    aligned,
    usable,
)
from workflow.lib.model.loss.chunked_loss import LinearCrossEntropy, OutputHead
from workflow.lib.model.loss.vocabulary_slices import CHUNK_ROWS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_run")]
HIDDEN, VOCAB = 256, 10_007
FORMS = {
    "plain": LogitForm(1.0, None),
    "scaled": LogitForm(0.25, None),
    "capped": LogitForm(1.0, 30.0),
    "both": LogitForm(2.0, 5.0),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [5, 64, 4096, 4097, VOCAB])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_sums_and_slopes_are_autograds(dtype, vocab, form):
    draw = torch.Generator().manual_seed(vocab)
    raw_logits = (torch.randn(7, vocab, generator=draw) * 8).to("cuda", dtype)
    columns = torch.randint(vocab, (7,), generator=draw).cuda()
    columns[0], columns[3] = IGNORED, ELSEWHERE
    leaf = raw_logits.double().requires_grad_()
    logits = leaf * form.scale
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    sums = logits.logsumexp(dim=1)
    chosen = logits.gather(1, columns.clamp(0)[:, None])[:, 0].masked_fill(columns < 0, 0.0)
    (sums - chosen).masked_fill(columns == IGNORED, 0.0).sum().backward()

    fused = FusedLogits(aligned(7, vocab, raw_logits).copy_(raw_logits), form)
    found = fused.sums(columns)
    torch.testing.assert_close(found, (sums.float(), chosen.float()), rtol=1e-5, atol=1e-5)
    slopes = fused.slopes(found[0], columns)
    assert slopes.dtype == dtype
    torch.testing.assert_close(slopes, leaf.grad.to(dtype), rtol=2**-7, atol=1e-6)


def summed(loss, states, targets, _):
    return 3 * loss.summed_loss(states, targets)


def weighted(loss, states, targets, weights):
    return 3 * loss.summed_loss(states, targets, weights)


def squared(loss, states, targets, weights):
    return (weights * loss.log_probs(states, targets).square()).sum()


@pytest.mark.parametrize("loss_of", [summed, weighted, squared])
@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_loss_and_gradients_are_those_without_kernels(form, trains_head, loss_of):
    """Of more than a chunk, some of whose rows have no target."""
    torch.manual_seed(0)
    module = nn.Linear(HIDDEN, VOCAB, bias=False, device="cuda")
    module.weight.data *= 4
    if not trains_head:
        module = module.to(torch.bfloat16).requires_grad_(False)
    head = OutputHead(module, *form)
    rows = CHUNK_ROWS + 77
    hidden = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(VOCAB, (rows,), device="cuda")
    targets[5:50] = IGNORED
    assert usable(hidden, form)
    slopes = torch.rand(rows, device="cuda")
    results = []
    for fused in (True, False):
        states = hidden.clone().requires_grad_()
        module.zero_grad()
        loss = loss_of(LinearCrossEntropy(replace(head, fused=fused)), states, targets, slopes)
        loss.backward()
        weights = module.weight.grad if trains_head else torch.zeros(1, device="cuda")
        results.append((loss.detach(), states.grad, weights))
    (loss, states_grad, weights_grad), expected = results
    torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=0.0)
    for ours, theirs in ((states_grad, expected[1]), (weights_grad, expected[2])):
        error = (ours.float() - theirs.float()).norm() / (theirs.float().norm() + 1e-9)
        assert error < (2e-3 if loss_of is summed else 4e-3)  # rows' slopes round once more


def test_loss_takes_the_memory_of_its_product():
    """Besides what its rows take."""
    module = nn.Linear(64, 65_536, bias=False, device="cuda", dtype=torch.bfloat16)
    head = OutputHead(module.requires_grad_(False), 1.0, None)
    hidden = torch.randn(1024, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(65_536, (1024,), device="cuda")
    peaks = []
    for fused in (True, False):
        loss = LinearCrossEntropy(replace(head, fused=fused))
        loss(hidden, targets).backward()  # cuBLAS' workspace is there afterwards
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss(hidden, targets).backward()
        peaks.append((torch.cuda.max_memory_allocated() - before) / (1024 * 65_536))
    assert peaks[0] < 2.1
    assert peaks[1] > 11.9
