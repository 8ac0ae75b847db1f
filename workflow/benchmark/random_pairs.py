"""Random pairs of answers to one prompt, of drawn lengths, and their packed rows.

Lengths are log-normal: prompts with a median of 120 tokens and a spread of 1, answers 250 and 0.7.
No part has more than 1,024, or a quarter of a row."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workflow.lib.data.tokens.packing import Packing, pack
from workflow.lib.data.tokens.token_store import TokenStore

SEED = 0
PROMPT, ANSWER = (120, 1.0), (250, 0.7)  # median, tokens, and deviation of the logarithm
SHORTEST, LONGEST = 4, 1024

Ids = npt.NDArray[np.uint32]


class Pair(NamedTuple):
    """Token ids of a prompt and its answers, each of shape (tokens,)."""

    prompt: Ids
    chosen: Ids
    rejected: Ids


def random_pairs(count: int, *, seq_len: int, vocab_size: int) -> list[Pair]:
    """Return `count` pairs of drawn lengths, the same at each call."""
    draw = np.random.default_rng(SEED)

    def ids(median: int, deviation: float) -> Ids:
        length = draw.lognormal(np.log(median), deviation)
        length = int(np.clip(length, SHORTEST, max(SHORTEST, min(LONGEST, seq_len // 4))))
        return draw.integers(0, vocab_size, length).astype(np.uint32)

    return [Pair(ids(*PROMPT), ids(*ANSWER), ids(*ANSWER)) for _ in range(count)]


def packed(pairs: list[Pair], *, seq_len: int) -> Packing:
    """Return in which rows the pairs lie."""
    lengths = [2 * len(p.prompt) + len(p.chosen) + len(p.rejected) for p in pairs]
    return pack(np.array(lengths, dtype=np.int64), seq_len=seq_len, seed=SEED)


def pair_rows(pairs: list[Pair], *, seq_len: int) -> TokenStore:
    """Return the packed rows; answers are trained."""
    arrays = answer_arrays(pairs, packed(pairs, seq_len=seq_len), seq_len=seq_len)
    return TokenStore(manifest={"examples": "pairs"}, arrays=arrays)


def answer_arrays(
    examples: Sequence[tuple[Ids, ...]], packing: Packing, *, seq_len: int
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a tokens folder, by name. examples: each a prompt and its answers, which
    are trained."""
    shape = (packing.num_rows, seq_len)
    ids, mask = np.zeros(shape, dtype=np.uint32), np.zeros(shape, dtype=np.bool_)
    positions = np.zeros(shape, dtype=np.int32)
    for row in range(packing.num_rows):
        start = 0
        for number in packing.row(row):
            prompt, *answers = examples[number]
            for answer in answers:
                document = np.concatenate([prompt, answer])
                span = slice(start, start + len(document))
                ids[row, span], positions[row, span] = document, np.arange(len(document))
                mask[row, start + len(prompt) : span.stop] = True
                start = span.stop
        positions[row, start:] = np.arange(seq_len - start)
    return {
        "train.input_ids.npy": ids,
        "train.loss_mask.npy": mask,
        "train.position_ids.npy": positions,
        "heldout.input_ids.npy": ids[0],
        "heldout.loss_mask.npy": mask[0],
        "heldout.offsets.npy": np.array([0, seq_len]),
    }
