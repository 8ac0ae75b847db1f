"""The chunked loss against torch's cross-entropy, and which positions count."""

import pytest
import torch
from torch import nn

from tests.support.models import VOCAB, adapted
from workflow.lib.kernels.attention.packed import document_bounds
from workflow.lib.kernels.loss.fused_logits import (
    IGNORED,
    frozen_logits,
    head_matmul,
    with_aligned_rows,
)
from workflow.lib.model.lora import ROWS as TABLE_ROWS
from workflow.lib.model.lora import TrainedRows
from workflow.lib.model.loss import chunked_loss
from workflow.lib.model.loss.chunked_loss import LinearCrossEntropy, OutputHead
from workflow.lib.model.loss.vocabulary_slices import CHUNK_ROWS, GRADIENT_ROWS, TRAINED_ROWS
from workflow.lib.model.micro_batch import MicroBatch

HIDDEN = 13
ROWS = {
    "one": 1,
    "a chunk less one": CHUNK_ROWS - 1,
    "a chunk": CHUNK_ROWS,
    "two chunks and 3": 2 * CHUNK_ROWS + 3,
}


def draw(rows):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=generator)
    return hidden, torch.randint(0, VOCAB, (rows,), generator=generator)


@pytest.fixture(params=[(1.0, None), (1.0, 3.0), (0.25, None)], ids=["plain", "capped", "scaled"])
def head(request):
    torch.manual_seed(0)
    module = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    scale, softcap = request.param
    return OutputHead(module, scale, softcap)


def reference(head, hidden, targets):
    """The same by torch alone, in fp64."""
    assert isinstance(head.module, nn.Linear)
    logits = head.scale * hidden.double() @ head.module.weight.double().t()
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return nn.functional.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_loss_and_gradient_equal_torch_for_any_number_of_chunks(head, rows):
    hidden, targets = draw(rows)
    hidden.requires_grad_()
    ours, theirs = LinearCrossEntropy(head)(hidden, targets), reference(head, hidden, targets)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=0)  # fp32 sum of <= 3 chunks
    (7 * ours).backward()
    expected = torch.autograd.grad(7 * theirs, hidden)
    torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-4, atol=1e-5)


def test_no_rows_cost_nothing_but_keep_their_gradient(head):
    """A micro-batch without a trained token must take part in backward: other processes wait for
    it."""
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    loss = LinearCrossEntropy(head)(hidden, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss == 0.0
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, HIDDEN)


def test_gradient_of_the_rows_is_not_held_by_the_loss(head):
    hidden, targets = draw(3)
    hidden.requires_grad_()
    loss = LinearCrossEntropy(head)(hidden, targets)
    loss.backward()
    assert loss.grad_fn is not None
    assert loss.grad_fn.grad is None  # type: ignore[attr-defined]


def test_without_targets_the_logits_are_returned(head):
    hidden, _ = draw(5)
    logits = LinearCrossEntropy(head).head.logits(hidden)
    assert torch.equal(logits, head.logits(hidden))
    assert logits.dtype == torch.float32


def test_logits_of_a_whole_batch_never_exist(head, monkeypatch):
    """The head sees at most `CHUNK_ROWS` rows at a time."""
    seen: list[int] = []

    def counted(hidden, *head):
        seen.append(len(hidden))
        return frozen_logits(hidden, *head)

    monkeypatch.setattr(chunked_loss, "frozen_logits", counted)
    hidden, targets = draw(2 * CHUNK_ROWS + 3)
    LinearCrossEntropy(head)(hidden.requires_grad_(), targets).backward()
    assert seen == [CHUNK_ROWS, CHUNK_ROWS, 3]


@pytest.fixture(scope="module")
def training(tiny_base):
    return adapted(tiny_base, r=2)


def batch():
    ids = torch.randint(0, VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))
    places = torch.arange(19).repeat(2, 1)
    places[1, 7:] -= 7  # two documents in the second row
    return ids, places


def loss(training, ids, places, chosen, targets):
    summed: torch.Tensor = training(
        MicroBatch(
            input_ids=ids,
            position_ids=places,
            positions=chosen,
            targets=targets,
            bounds=document_bounds(places),
        )
    )
    return summed


@torch.no_grad()
def test_loss_is_that_of_the_chosen_positions_alone(training):
    ids, places = batch()
    chosen = torch.tensor([0, 4, 20, 33])
    targets = ids.flatten()[chosen + 1]
    logits = training.family_logits(ids[:1], places[:1])
    first = nn.functional.cross_entropy(logits[[0, 4]], targets[:2], reduction="sum")
    second = loss(training, ids[1:], places[1:], chosen[2:] - 19, targets[2:])
    # another batch shape, so other kernels; fp32
    torch.testing.assert_close(
        loss(training, ids, places, chosen, targets), first + second, rtol=1e-5, atol=0
    )


@torch.no_grad()
def test_another_document_of_the_row_has_no_influence(training):
    ids, places = batch()
    chosen, targets = torch.arange(19 + 7, 38), torch.arange(12)
    before = loss(training, ids, places, chosen, targets)
    ids[1, :7] = 0
    assert torch.equal(loss(training, ids, places, chosen, targets), before)


def assert_rounded(ours, exact):
    """Twice at most, for a sum of two matmuls; fp32 also in the sums of up to 49,159 terms."""
    times = 32 if ours.dtype == torch.float32 else 2
    bound = times * torch.finfo(ours.dtype).eps * exact.abs().max()
    assert (ours - exact).abs().max() < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 8, 211, 49_159])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_of_a_product_begin_at_whole_16_bytes(dtype, vocab, biased):
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 16, dtype=dtype), torch.randn(vocab, 16, dtype=dtype)
    bias = torch.randn(vocab, dtype=dtype) if biased else None
    raw_logits = head_matmul(hidden, weight, bias)
    exact = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_rounded(raw_logits, exact)
    gradient = torch.randn(5, vocab, dtype=dtype)
    for rows in (raw_logits, with_aligned_rows(gradient)):
        assert (rows.shape, rows.dtype) == ((5, vocab), dtype)
        assert rows.stride(0) * rows.element_size() % 16 == 0
    assert torch.equal(with_aligned_rows(gradient), gradient)
    leaf = hidden.clone().requires_grad_()
    (gradient.float() * frozen_logits(leaf, weight, bias)).sum().backward()
    assert leaf.grad is not None
    assert_rounded(leaf.grad, gradient.double() @ weight.double())


@pytest.mark.parametrize("slopes", ["known before", "of the log-probabilities"])
@pytest.mark.parametrize("trained", [False, True, "some rows"])
@pytest.mark.parametrize("rows", [0, 5, CHUNK_ROWS + 3])
def test_rows_have_slopes_of_their_own(rows, trained, slopes):
    """The first are weights, the second follow from the log-probabilities; frozen and trained
    heads, and frozen ones with trained rows; over several pieces of the vocabulary, none of them
    whole, and several chunks of rows."""
    torch.manual_seed(0)
    module = nn.Linear(HIDDEN, 2 * GRADIENT_ROWS + 5).requires_grad_(trained is True)
    some = None if trained != "some rows" else slice(3, 150)  # most targets are there
    hidden, targets = draw(rows)
    targets[1::5] = IGNORED
    weights = 2 * torch.rand(len(targets), generator=torch.Generator().manual_seed(0))
    ours = LinearCrossEntropy(OutputHead(module, 0.5, 3.0))
    exact, leaf = nn.Linear(HIDDEN, 2 * GRADIENT_ROWS + 5).double(), hidden.double()
    exact.load_state_dict(module.state_dict())
    if some is not None:
        setattr(
            module, TABLE_ROWS, rows_of_head := TrainedRows(module, range(some.start, some.stop))
        )
        rows_of_head.values().data.copy_(module.weight[some] + 0.1)
        rows_of_head.write_(module.weight)
        exact.weight.data[some] += 0.1
    logits = 3.0 * torch.tanh(0.5 * exact(leaf.requires_grad_()) / 3.0)
    log_probs = -nn.functional.cross_entropy(logits, targets, reduction="none")
    if slopes == "known before":
        loss = 7 * ours.summed_loss(hidden.requires_grad_(), targets, weights)
        expected = 7 * -(log_probs * weights.double()).sum()
    else:
        loss = _curved(ours.log_probs(hidden.requires_grad_(), targets), weights)
        expected = _curved(log_probs, weights.double())
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    pairs = [(hidden, leaf)]
    pairs += [(module.weight, exact.weight), (module.bias, exact.bias)] if trained is True else []
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5, check_dtype=False)
    if some is not None:
        expected = exact.weight.grad[some].float()
        torch.testing.assert_close(rows_of_head.values().grad, expected, rtol=1e-4, atol=1e-5)


def _curved(log_probs, weights):
    """A loss whose slopes depend on the log-probabilities."""
    return (weights * log_probs.square()).sum() / 3


@pytest.mark.parametrize(
    ("trained", "fused", "times"), [(True, True, TRAINED_ROWS), (True, False, 1), (False, True, 1)]
)
def test_chunks_of_a_trained_head_are_larger_on_gpus(trained, fused, times, monkeypatch):
    """Torch's own loss has copies in fp32, of which there is no room for more."""
    module = nn.Linear(4, 8, device="meta").requires_grad_(trained)
    head = OutputHead(module, 1.0, None, fused=fused)
    assert head.chunk_rows(1) == CHUNK_ROWS
    monkeypatch.setattr(chunked_loss, "GPUS", ("meta",))
    assert head.chunk_rows(1) == times * CHUNK_ROWS
