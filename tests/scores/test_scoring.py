"""Scores are those of stock Transformers, which gets each document alone, in either way of running
the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.families import tiny_family
from tests.support.mixtures import tiny_mixture
from tests.support.models import VOCAB, adapted, random_store, stock_base, tiny_llama
from tests.support.rounding import allowed, lost
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.scores.scoring import Scorer, WholeModel, rows_of, scores_of
from workflow.lib.scores.store import Scores, parts_of
from workflow.lib.scores.streamed_model import StreamedModel, StreamedScorer
from workflow.lib.training.batches import stored_batch

CPU = torch.device("cpu")
K = 5
FAMILIES = {
    "llama": lambda folder: tiny_llama(folder),
    "mixtral": lambda folder: tiny_mixture("mixtral", folder, vocab_size=VOCAB),
    "qwen3_5_text": lambda folder: tiny_family("qwen3_5_text", folder, vocab_size=VOCAB),
}


@pytest.fixture(scope="module")
def store() -> TokenStore:
    return random_store(rows=4, seq_len=48)


@contextmanager
def whole(folder: Path) -> Iterator[Scorer]:
    model = stock_base(folder)
    yield WholeModel(model, device=CPU, top_k=K, vocabulary=VOCAB)


@contextmanager
def streamed(folder: Path) -> Iterator[Scorer]:
    with StreamedModel(Checkpoint(folder), device=CPU, dtype=torch.float32).stream() as stream:
        yield StreamedScorer(stream, device=CPU, top_k=K, vocabulary=VOCAB)


def all_scores(scorer: Scorer, store: TokenStore) -> Scores:
    """Return the scores of training rows and held-out documents."""
    found = []
    for part in parts_of(store, shard_tokens=100):  # several, of which one is cut by a row
        rows = rows_of(store, part, attention=scorer.attention)
        found.append(scorer.scores(rows, lambda share: None))
    return Scores.joined(found)


def documents(store: TokenStore) -> Iterator[tuple[Any, Any]]:
    """Yield ids and mask of every document that the scores are of."""
    for ids, positions, mask in zip(
        store.input_ids, store.position_ids, store.loss_mask, strict=True
    ):
        cuts = np.flatnonzero(positions == 0)[1:]
        yield from zip(np.split(ids, cuts), np.split(mask, cuts), strict=True)
    yield from store.heldout_documents()


@torch.no_grad()
def stock(folder: Path, store: TokenStore, dtype: torch.dtype) -> torch.Tensor:
    """Return all log-probabilities (trained tokens, vocabulary), and below them those of the
    tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.config.get_text_config()._experts_implementation = "eager"  # the others know no float64
    found = []
    for ids, mask in documents(store):
        row = torch.from_numpy(ids.astype(np.int64))[None]
        shown = model(input_ids=row, use_cache=False).logits[0].log_softmax(-1)
        found.append(shown[torch.from_numpy(np.flatnonzero(mask)) - 1])
    return torch.cat(found)


def targets(store: TokenStore) -> torch.Tensor:
    found = [ids[mask].astype(np.int64) for ids, mask in documents(store)]
    return torch.from_numpy(np.concatenate(found))


@pytest.mark.parametrize("way", [whole, streamed])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_each_document_alone_in_stock_transformers(
    tmp_path, store, family, way
):
    folder = FAMILIES[family](tmp_path)
    exact = stock(folder, store, torch.float64)
    share = allowed([lost(stock(folder, store, torch.float32), exact)])
    with way(folder) as scorer:
        found = all_scores(scorer, store)
    log_probs, ids, top, rest = (torch.from_numpy(np.asarray(x)) for x in found)
    ids = ids.long()
    assert lost(log_probs, exact.gather(1, targets(store)[:, None])[:, 0]) <= share
    assert lost(top, exact.topk(K).values) <= share
    assert lost(top, exact.gather(1, ids)) <= share  # each is the token's own
    others = exact.scatter(1, ids, float("-inf")).logsumexp(-1)
    assert lost(rest, others) <= share


def test_scores_of_the_base_are_those_of_the_first_forward_of_a_training(tiny_base, store):
    """Its adapters begin at zero. Stock bitsandbytes here, modules of ours there."""
    with whole(tiny_base) as scorer:
        found = all_scores(scorer, store).log_probs
    training = adapted(tiny_base, r=4)
    batch = stored_batch(store, np.arange(store.num_rows))
    with torch.no_grad():
        hidden = training.hidden_states(batch.input_ids, batch.position_ids)
        states = hidden.index_select(0, batch.positions)
        first = training.head_loss.log_probs(states, batch.targets)
    assert lost(torch.from_numpy(found[: len(first)]), first) <= allowed([])


def test_rest_is_nothing_where_every_token_is_stored():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    found = scores_of(logits, torch.tensor([0, 1, 2]), top_k=7, vocabulary=7)
    assert found.rest is not None
    assert (found.rest == -np.inf).all()


def test_tokens_that_only_the_teacher_has_are_in_the_rest():
    logits = torch.tensor([[0.0, 1.0, 5.0]])
    found = scores_of(logits, torch.tensor([0]), top_k=2, vocabulary=2)
    assert found.top_ids is not None
    assert found.rest is not None
    assert found.top_ids.tolist() == [[1, 0]]
    assert found.rest[0] == pytest.approx(float(logits.log_softmax(-1)[0, 2]))
