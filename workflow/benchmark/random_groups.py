"""Random groups of answers to one prompt, a row each: 8 answers of a 24th of a row to a prompt of a
12th (512 and 1,024 tokens in rows of 12,288)."""

import numpy as np

from workflow.benchmark.random_pairs import SEED, answer_arrays
from workflow.lib.data.tokens.group_rows import Answer, Group
from workflow.lib.data.tokens.packing import one_per_row
from workflow.lib.data.tokens.token_store import TokenStore

ANSWERS = 8


def prompt_tokens(seq_len: int) -> int:
    return seq_len // 12


def answer_tokens(seq_len: int) -> int:
    return seq_len // 24


def random_groups(count: int, *, seq_len: int, vocab_size: int) -> list[Group]:
    """Return `count` groups, the same at each call; log-probabilities are those of a uniform
    sampler."""
    draw = np.random.default_rng(SEED)
    length = answer_tokens(seq_len)
    sampled = [-float(np.log(vocab_size))] * length
    return [
        Group(
            prompt=draw.integers(0, vocab_size, prompt_tokens(seq_len)).tolist(),
            answers=[
                Answer(draw.integers(0, vocab_size, length).tolist(), sampled, draw.normal())
                for _ in range(ANSWERS)
            ],
            file="drawn",
            row=number + 1,
        )
        for number in range(count)
    ]


def group_rows(groups: list[Group], *, seq_len: int) -> TokenStore:
    """Return the rows; answers are trained."""
    units = [
        tuple(np.array(ids, dtype=np.uint32) for ids in (g.prompt, *(a.ids for a in g.answers)))
        for g in groups
    ]
    lengths = np.full(len(groups), seq_len, dtype=np.int64)
    packing = one_per_row(lengths, seq_len=seq_len, seed=SEED)
    arrays = answer_arrays(units, packing, seq_len=seq_len)
    mask, positions = (arrays[f"train.{name}.npy"] for name in ("loss_mask", "position_ids"))
    advantages, sampled = (np.zeros(mask.shape, dtype=np.float32) for _ in range(2))
    for row in range(packing.num_rows):
        (number,) = packing.row(row)
        answers = groups[number].answers
        starts = np.flatnonzero(positions[row] == 0)[: len(answers)]
        for start, answer in zip(starts, answers, strict=True):
            advantages[row, start:] = answer.advantage
        sampled[row, mask[row]] = np.concatenate([answer.log_probs for answer in answers])
    arrays |= {"train.advantages.npy": advantages, "train.sampled_log_probs.npy": sampled}
    return TokenStore(manifest={"examples": "groups"}, arrays=arrays)
