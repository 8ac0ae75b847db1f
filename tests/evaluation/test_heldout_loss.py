import numpy as np
import pytest
import torch

from tests.support.models import random_llama
from tests.support.tiny import VOCAB_SIZE
from tests.support.tiny_export import random_documents
from workflow.lib.data.tokens.token_store import choose_documents
from workflow.lib.evaluation import heldout_loss
from workflow.lib.evaluation.heldout_loss import heldout_losses

CPU = torch.device("cpu")
DOCUMENTS = random_documents(11)

# fp32 through two layers, sums in another order: about 1e-6 relative; sums over up to 41 tokens.
CLOSE = {"rtol": 2e-5, "atol": 1e-4}


@pytest.fixture(scope="module")
def model():
    return random_llama(vocab_size=VOCAB_SIZE).eval()


def measured(model, documents, *, batch_size=4):
    return heldout_losses(model, documents, batch_size=batch_size, device=CPU)


@torch.no_grad()
def naive(model, ids, mask):
    """One document, one token at a time, in double precision."""
    log_p = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double().log_softmax(-1)
    return -sum(float(log_p[i - 1, int(ids[i])]) for i in range(len(ids)) if mask[i])


def test_losses_equal_a_naive_reference_in_document_order(model):
    expected = [naive(model, ids, mask) for ids, mask in DOCUMENTS]
    np.testing.assert_allclose([s for s, _ in measured(model, DOCUMENTS)], expected, **CLOSE)


def test_losses_of_a_class_that_makes_all_logits_are_the_same(model, monkeypatch):
    """Qwen's thinkers have no `logits_to_keep`."""
    expected = measured(model, DOCUMENTS)
    whole = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda *args, logits_to_keep, **named: whole(*args, **named)
    )
    assert measured(model, DOCUMENTS) == expected


@pytest.mark.parametrize("batch_size", [1, 3, 11, 64])
def test_losses_do_not_depend_on_the_batch_size(model, batch_size):
    of_size = [s for s, _ in measured(model, DOCUMENTS, batch_size=batch_size)]
    np.testing.assert_allclose(of_size, [s for s, _ in measured(model, DOCUMENTS)], **CLOSE)


def test_losses_do_not_depend_on_the_memory_for_logits(model, monkeypatch):
    expected = [s for s, _ in measured(model, DOCUMENTS)]
    monkeypatch.setattr(heldout_loss, "LOGITS_BYTES", 4 * VOCAB_SIZE * 50)
    monkeypatch.setattr(heldout_loss, "CHUNK_ROWS", 7)
    np.testing.assert_allclose([s for s, _ in measured(model, DOCUMENTS)], expected, **CLOSE)


def test_what_follows_the_last_trained_token_does_not_matter(model):
    ids, mask = DOCUMENTS[0]
    longer = (np.append(ids, [8, 9, 10]).astype(np.uint32), np.append(mask, [False] * 3))
    (alone, _), (extended, _) = measured(model, [(ids, mask), longer])
    assert alone == pytest.approx(extended, rel=2e-5)


def test_documents_without_trained_tokens_are_not_chosen():
    untrained = (DOCUMENTS[0][0], np.zeros_like(DOCUMENTS[0][1]))
    documents = [DOCUMENTS[1], untrained, DOCUMENTS[2]]
    assert choose_documents(documents, at_most=None, seed=0) == [0, 2]
