"""Rows of packed documents with what a model is said to say of them, for tests of objectives."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.models import VOCAB, heldout_from
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.scores.store import Scores

SEQ_LEN = 29
# Lengths of the documents of each row; what is left is padding. Pairs are two neighbours.
ROWS = ((7, 9), (5, 6, 8, 9), (12, 17), (4, 5, 6, 7), (13, 3), (8, 8, 6, 7))


# Tokens of prompt, first and second answer of examples; what is left of a row is padding.
PROMPTED = (
    ((9, 7, 5), (1, 4, 6)),
    ((13, 8, 11),),
    ((6, 1, 2), (2, 9, 8), (0, 2, 3)),
    ((20, 3, 2),),
)
PROMPTED_LEN = 53


# The same of groups: two groups with prompts of one length, one prompt of a token, an answer alone.
GROUPED = (
    ((7, 7, 5, 2, 1),),
    ((6, 8, 3, 2), (6, 1, 1)),
    ((0, 1, 2, 4), (5, 6), (2, 3, 1, 9)),
    ((14, 3, 2),),
)


def rewarded(
    positions: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[np.float32]]:
    """Return the arrays of groups for rows: an advantage of each document, and log p by a sampler
    that is about as sure as an untrained model."""
    draw = np.random.default_rng(7)
    numbers = (positions == 0).ravel().cumsum()
    drawn = draw.choice([-1.5, -0.4, 0.0, 0.7, 1.2], numbers.max() + 1)
    padding = np.bincount(numbers, weights=mask.ravel())[numbers] == 0
    advantages = np.where(padding, 0.0, drawn[numbers]).reshape(mask.shape)
    log_probs = np.where(mask, near_uniform(draw, mask.shape), 0.0)
    return {"advantages": np.float32(advantages), "sampled_log_probs": np.float32(log_probs)}


def near_uniform(draw: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return -np.log(VOCAB) + 0.4 * draw.standard_normal(shape)


def prompted_rows(examples: str) -> TokenStore:
    """Return rows of examples whose documents have the same prompt, and answers that begin alike.
    All tokens of answers are trained, with scores."""
    draw, rows = np.random.default_rng(3), GROUPED if examples == "groups" else PROMPTED
    shape = (len(rows), PROMPTED_LEN)
    ids, mask = np.zeros(shape, dtype=np.uint32), np.zeros(shape, dtype=np.bool_)
    positions, desirable = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.bool_)
    for row, of_row in enumerate(rows):
        start = 0
        for number, (prompt, *answers) in enumerate(of_row):
            shared = draw.integers(3, 97, prompt)  # of all tiny models
            for length in answers:
                document = np.concatenate([shared, [7], draw.integers(3, 97, length)])
                span = slice(start, start + len(document))
                ids[row, span], positions[row, span] = document, np.arange(len(document))
                mask[row, start + max(1, prompt) : span.stop] = True
                desirable[row, span] = number % 2 == 0
                start = span.stop
        positions[row, start:] = np.arange(PROMPTED_LEN - start)
    arrays = {"input_ids": ids, "loss_mask": mask, "position_ids": positions}
    heldout = {"input_ids": ids[0], "loss_mask": mask[0], "offsets": np.array([0, PROMPTED_LEN])}
    if examples == "rated":
        arrays["desirable"], heldout["desirable"] = desirable, desirable[0]
    if examples == "groups":
        arrays |= rewarded(positions, mask)
    named = {f"train.{name}.npy": array for name, array in arrays.items()}
    named |= {f"heldout.{name}.npy": array for name, array in heldout.items()}
    store = TokenStore(manifest={"examples": examples}, arrays=named)
    return store.with_scores(DrawnScores(mask, top_k=0, close=examples == "groups"))


class DrawnScores:
    """Scores of every trained token, drawn once. close: about those of an untrained model."""

    def __init__(
        self, loss_mask: npt.NDArray[np.bool_], *, top_k: int, close: bool = False
    ) -> None:
        draw = np.random.default_rng(5)
        self._mask = loss_mask
        shape = (*loss_mask.shape, VOCAB)
        logits = 2 * draw.standard_normal(shape)
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        order = np.argsort(-log_probs, axis=-1)
        likeliest, others = order[..., :top_k], order[..., top_k:]
        self._top_ids = likeliest.astype(np.uint32)
        self._top = np.take_along_axis(log_probs, likeliest, axis=-1).astype(np.float32)
        rest = np.exp(np.take_along_axis(log_probs, others, axis=-1)).sum(axis=-1)
        self._rest = np.log(rest).astype(np.float32)
        self._log_probs = -3 * draw.random(loss_mask.shape).astype(np.float32)
        if close:
            self._log_probs = near_uniform(draw, loss_mask.shape).astype(np.float32)
        self._teaches = top_k > 0

    def for_rows(self, indices: Iterable[int]) -> Scores:
        rows = list(indices)
        mask = self._mask[rows]
        if not self._teaches:
            return Scores(self._log_probs[rows][mask])
        arrays = (self._log_probs, self._top_ids, self._top, self._rest)
        return Scores(*(array[rows][mask] for array in arrays))

    def heldout(self, number: int) -> Scores:
        """Of the document of this number in the rows: the held-out documents are the same."""
        spans = [(row, span) for row, of_row in enumerate(ROWS) for span in spans_of(of_row)]
        row, span = spans[number]
        before = int(self._mask[row, : span.start].sum())
        here = slice(before, before + int(self._mask[row, span].sum()))
        return Scores(*(None if x is None else x[here] for x in self.for_rows([row])))


def spans_of(lengths: Sequence[int]) -> list[slice]:
    """Return where documents of these lengths lie in a row."""
    ends = np.cumsum(lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


class GivenScores:
    """Log-probabilities (n,) of the trained tokens of all rows, in their order."""

    def __init__(
        self, loss_mask: npt.NDArray[np.bool_], log_probs: npt.NDArray[np.float32] | None
    ) -> None:
        self._of = np.zeros(loss_mask.shape, dtype=np.float32)
        self._mask = loss_mask
        if log_probs is not None:
            self._of[loss_mask] = log_probs

    def for_rows(self, indices: Iterable[int]) -> Scores:
        rows = list(indices)
        return Scores(self._of[rows][self._mask[rows]])


def scored_rows(
    examples: str,
    *,
    rows: Sequence[Sequence[int]] = ROWS,
    top_k: int = 0,
    weights: bool = False,
    all_trained: bool = False,
) -> TokenStore:
    """Return rows of documents, of which about six in ten tokens are trained, or all but the first,
    with scores. The held-out documents are the same."""
    draw = np.random.default_rng(0)
    shape = (len(rows), SEQ_LEN)
    positions, mask = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.bool_)
    desirable = np.zeros(shape, dtype=np.bool_)
    for row, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths):
            span = slice(start, start + length)
            positions[row, span] = np.arange(length)
            mask[row, span] = (draw.random(length) < 0.6) & (positions[row, span] > 0)
            mask[row, span.stop - 1] = True
            mask[row, start + 1 : span.stop] |= all_trained
            desirable[row, span] = (row + number // 2) % 3 > 0
            start = span.stop
        positions[row, start:] = np.arange(SEQ_LEN - start)
    arrays = {
        "train.input_ids.npy": draw.integers(0, VOCAB, shape, dtype=np.uint32),
        "train.loss_mask.npy": mask,
        "train.position_ids.npy": positions,
    }
    if examples == "groups":
        named = rewarded(positions, mask).items()
        arrays |= {f"train.{name}.npy": array for name, array in named}
    spans = [(row, span) for row, of_row in enumerate(rows) for span in spans_of(of_row)]
    lengths = [span.stop - span.start for _, span in spans]
    arrays["heldout.offsets.npy"] = np.cumsum([0, *lengths])
    names = ["input_ids", "loss_mask"]
    if examples == "rated":
        arrays["train.desirable.npy"] = desirable
        names.append("desirable")
    for name in names:
        whole = arrays[f"train.{name}.npy"]
        arrays[f"heldout.{name}.npy"] = np.concatenate([whole[row, span] for row, span in spans])
    if weights:
        drawn = draw.choice([0.25, 1.0, 2.0], shape).astype(np.float32)
        arrays["train.weights.npy"] = whole = mask * drawn
        arrays["heldout.weights.npy"] = np.concatenate([whole[row, span] for row, span in spans])
    manifest = {"examples": examples} | heldout_from(answers=len(lengths))
    store = TokenStore(manifest=manifest, arrays=arrays)
    return store.with_scores(DrawnScores(mask, top_k=top_k, close=examples == "groups"))
