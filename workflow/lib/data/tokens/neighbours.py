"""Rated answers, each with a neighbour: the same prompt with the answer of another row.

KTO estimates from the neighbours how far the model is from its reference (Ethayarajh et al., arXiv
2402.01306, sec. 4.1). The neighbour's answer is that of the split's next row with a different
answer; the first row follows the last. It depends on the data alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workflow.lib.data.encoding.preference_rows import prompt_of
from workflow.lib.data.tokens.documents import Documents, collect_documents
from workflow.lib.data.tokens.encoded_shards import TABLE, Shard, digest, save_array
from workflow.lib.data.tokens.splits import Split
from workflow.lib.system.errors import UserError

Integers = npt.NDArray[np.int64]


def with_neighbours(split: Split, *, seq_len: int, work: Path) -> Split:
    """Return the split with a neighbour after each document, both at most `seq_len` tokens. Writes
    shards of the folder `work`. Raises `UserError` if an answer has no neighbour."""
    numbers = split.chosen.astype(np.int64)
    texts = (split.documents[number] for number in numbers.tolist())
    answers = [digest(ids[len(prompt_of(ids, mask)) :].tobytes()) for ids, mask in texts]
    digests = np.array(answers, dtype=np.uint64)
    found = next_others(split.documents.ordinals[numbers], digests)
    if (found < 0).any():
        file, row = split.origin(int(numbers[np.argmin(found)]))
        raise UserError(
            f"data.{split.name}: row {row} of {file} finds no other answer in its split, and KTO "
            "needs the same prompt with the answer of another row. Give it more rows, or set "
            "train.objective to sft."
        )
    shards: list[Shard] = []
    first = 0
    for shard, chosen in split.documents.by_shard(split.chosen):
        others = numbers[found[first : first + len(chosen)]]
        stem = work / f"{split.name}-neighbours-{len(shards):05d}"
        shards.append(_write_shard(split.documents, shard, chosen, others, seq_len, stem))
        first += len(chosen)
    documents = collect_documents(shards, folder=work, name=f"{split.name}-neighbours")
    chosen = np.arange(len(documents), dtype=np.uint32)
    return replace(split, documents=documents, chosen=chosen, examples="rated")


def next_others(ordinals: npt.NDArray[np.uint64], digests: npt.NDArray[np.uint64]) -> Integers:
    """Return for each answer the next one of another row that differs, around the end; -1 without
    one. ordinals: of their rows, digests: of their tokens, both of shape (answers,)."""
    found = np.full(len(digests), -1, dtype=np.int64)
    left = np.arange(len(digests))
    jump = _ends_of_runs(digests)
    place = left + 1
    while len(left):
        at = place % len(digests)
        equal = digests[at] == digests[left]
        good = ~equal & (ordinals[at] != ordinals[left])
        found[left[good]] = at[good]
        place = np.where(equal, place + jump[at], place + 1)
        kept = ~good & (place < left + len(digests))
        left, place = left[kept], place[kept]
    return found


def _ends_of_runs(digests: npt.NDArray[np.uint64]) -> Integers:
    """Return the distance from each answer to the next one that differs, up to the end."""
    edges = np.append(np.flatnonzero(digests[1:] != digests[:-1]) + 1, len(digests))
    lengths = np.diff(np.append(0, edges))
    return np.repeat(edges, lengths) - np.arange(len(digests))


def _write_shard(
    documents: Documents,
    number: int,
    chosen: npt.NDArray[np.uint32],
    others: Integers,
    seq_len: int,
    stem: Path,
) -> Shard:
    """Write the chosen documents of a shard, each followed by its neighbour."""
    source = documents.shards[number]
    rows = source.table()[chosen - documents.shard_offsets[number]]
    ids, masks, table = [], [], np.repeat(rows, 2).astype(TABLE)
    for place, pair in enumerate(zip(chosen.tolist(), others.tolist(), strict=True)):
        (own, mask), (other, other_mask) = (documents[n] for n in pair)
        prompt, answer = prompt_of(own, mask), slice(len(prompt_of(other, other_mask)), None)
        room = slice(seq_len - len(own))
        ids += [own, np.concatenate([prompt, other[answer]])[room]]
        no = np.zeros(len(prompt), dtype=np.bool_)
        masks += [mask, np.concatenate([no, other_mask[answer]])[room]]
        entry = table[2 * place + 1 : 2 * place + 2]
        entry["length"], entry["trained"] = len(ids[-1]), np.count_nonzero(masks[-1])
        entry["digest"] = digest(ids[-1].tobytes())
    for name, array in {"ids": np.concatenate(ids), "mask": np.concatenate(masks)}.items():
        save_array(stem, name, array)
    save_array(stem, "table", table)
    tokens = int(table["length"].sum())
    return replace(source, stem=stem, documents=len(table), tokens=tokens)
