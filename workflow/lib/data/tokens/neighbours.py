"""Rated answers, each with a neighbour: the same prompt with the answer of another row.

KTO estimates from the neighbours how far the model is from its reference (Ethayarajh et al., arXiv
2402.01306, sec. 4.1). The neighbour's answer is the split's next one of another row and prompt that
differs; the first row follows the last. If a split has none, as a small held-out one, it is an
answer of the training rows. It depends on the data alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workflow.lib.data.encoding.preference_rows import prompt_of
from workflow.lib.data.tokens.encoded_shards import TABLE, Documents, Shard, digest, save_array
from workflow.lib.data.tokens.splits import Split
from workflow.lib.system.errors import UserError

Integers = npt.NDArray[np.int64]


def with_neighbours(split: Split, *, seq_len: int, work: Path, train: Split) -> Split:
    """Return the split with a neighbour after each document, both at most `seq_len` tokens. An
    answer without one in its split has one of `train`. Writes shards of the folder `work`. Raises
    `UserError` if an answer has no neighbour."""
    prompts, answers = _digests(split)
    following = next_others(split.documents.ordinals[split.chosen], prompts, answers)
    partners = [(split.documents, int(split.chosen[index])) for index in following]
    lacking = np.flatnonzero(following < 0)
    train_prompts, train_answers = _digests(train if len(lacking) else split)
    for index in lacking.tolist():
        fitting = (train_prompts != prompts[index]) & (train_answers != answers[index])
        if not fitting.any():
            file, row = split.origin(int(split.chosen[index]))
            raise UserError(
                f"data.{split.name}: row {row} of {file} finds no other answer to another prompt, "
                "and KTO needs the same prompt with such an answer. Give it rows of more prompts, "
                "or set train.objective to sft."
            )
        drawn = np.flatnonzero(fitting)[index % int(fitting.sum())]
        partners[index] = train.documents, int(train.chosen[drawn])
    shards: list[Shard] = []
    first = 0
    for shard, chosen in split.documents.by_shard(split.chosen):
        neighbours = partners[first : first + len(chosen)]
        stem = work / f"{split.name}-neighbours-{len(shards):05d}"
        shards.append(_write_shard(split.documents, shard, chosen, neighbours, seq_len, stem))
        first += len(chosen)
    documents = Documents(shards)
    chosen = np.arange(len(documents), dtype=np.uint32)
    return replace(split, documents=documents, chosen=chosen, examples="rated")


def _digests(split: Split) -> npt.NDArray[np.uint64]:
    """Return the digests of a split's prompts and answers (2, documents)."""
    digests = np.empty((2, len(split.chosen)), dtype=np.uint64)
    for index, number in enumerate(split.chosen.tolist()):
        ids, mask = split.documents[number]
        prompt = prompt_of(ids, mask)
        digests[:, index] = [digest(x.tobytes()) for x in (prompt, ids[len(prompt) :])]
    return digests


def next_others(
    ordinals: npt.NDArray[np.uint64],
    prompts: npt.NDArray[np.uint64],
    answers: npt.NDArray[np.uint64],
) -> Integers:
    """Return for each answer the next one of another row that differs, to another prompt, around
    the end; -1 without one. All of shape (answers,): ordinals of rows, digests of tokens."""
    following = np.full(len(answers), -1, dtype=np.int64)
    pending = np.arange(len(answers))
    ends = [(digests, _ends_of_runs(digests)) for digests in (prompts, answers)]
    candidate = pending + 1
    while len(pending):
        at = candidate % len(answers)
        step = (ordinals[at] == ordinals[pending]).astype(np.int64)
        for digests, distance in ends:
            step = np.maximum(step, np.where(digests[at] == digests[pending], distance[at], 0))
        following[pending[step == 0]] = at[step == 0]
        candidate += step
        is_pending = (step > 0) & (candidate < pending + len(answers))
        pending, candidate = pending[is_pending], candidate[is_pending]
    return following


def _ends_of_runs(digests: npt.NDArray[np.uint64]) -> Integers:
    """Return the distance from each answer to the end of its run of equal answers."""
    edges = np.append(np.flatnonzero(digests[1:] != digests[:-1]) + 1, len(digests))
    lengths = np.diff(np.append(0, edges))
    return np.repeat(edges, lengths) - np.arange(len(digests))


def _write_shard(
    documents: Documents,
    number: int,
    chosen: npt.NDArray[np.uint32],
    partners: Sequence[tuple[Documents, int]],
    seq_len: int,
    stem: Path,
) -> Shard:
    """Write the chosen documents of a shard, each followed by its neighbour."""
    source = documents.shards[number]
    rows = source.table()[chosen - documents.shard_offsets[number]]
    ids, masks, table = [], [], np.repeat(rows, 2).astype(TABLE)
    for index, (number_of_own, (source_of_other, number_of_other)) in enumerate(
        zip(chosen.tolist(), partners, strict=True)
    ):
        row_ids, mask = documents[number_of_own]
        partner, other_mask = source_of_other[number_of_other]
        prompt, answer = (
            prompt_of(row_ids, mask),
            slice(len(prompt_of(partner, other_mask)), None),
        )
        fitting = slice(seq_len - len(row_ids))
        ids += [row_ids, np.concatenate([prompt, partner[answer]])[fitting]]
        untrained = np.zeros(len(prompt), dtype=np.bool_)
        masks += [mask, np.concatenate([untrained, other_mask[answer]])[fitting]]
        entry = table[2 * index + 1 : 2 * index + 2]
        entry["length"], entry["trained"] = len(ids[-1]), np.count_nonzero(masks[-1])
        entry["digest"] = digest(ids[-1].tobytes())
    for name, array in {"ids": np.concatenate(ids), "mask": np.concatenate(masks)}.items():
        save_array(stem, name, array)
    save_array(stem, "table", table)
    tokens = int(table["length"].sum())
    return replace(source, stem=stem, documents=len(table), tokens=tokens)
