"""The two splits: the documents of each; no held-out document is also trained on. Rated answers
have a neighbour each."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workflow.lib.data.encoding.preference_rows import prompt_of
from workflow.lib.data.tokens.corpus import Corpus
from workflow.lib.data.tokens.encoded_shards import TABLE, Documents, Shard, digest, save_array
from workflow.lib.data.tokens.token_store import Document
from workflow.lib.settings.objectives import Examples
from workflow.lib.system.errors import UserError

Numbers = npt.NDArray[np.uint32]


def drawn(count: int, *, total: int, seed: int | Sequence[int]) -> Numbers:
    """Return `count` of the numbers below `total`, each at most once, in the order of the draw."""
    order = np.arange(total, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed)).shuffle(order)
    return order[:count].copy()  # a view would keep all of them


def times_taken(documents: int, *, weight: float, source: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return how often an epoch takes each document of a source, shape (documents,). Weight w:
    floor(w) times, and a share of w - floor(w) (rounded, at least one of a source that would lose
    all) once more, drawn by `seed` independently of other sources."""
    full_times, share = int(weight), weight - int(weight)
    extra = round(share * documents)
    if full_times == 0 and documents:
        extra = max(1, extra)
    times = np.full(documents, full_times, dtype=np.uint8)
    times[drawn(extra, total=documents, seed=[seed, source])] += 1
    return times


@dataclass(frozen=True)
class Split:
    """The documents of one split, and its counts of read and dropped rows. `chosen` numbers them in
    their corpus, ascending except for whole repeated units. A document of a weighted source may be
    chosen more than once, or not at all. examples: of `pairs` and `rated`, a unit is two
    consecutive documents."""

    name: str
    corpus: Corpus
    documents: Documents
    chosen: Numbers
    rows_read: int
    rows_dropped: int
    examples: Examples = "texts"

    @property
    def unit(self) -> int:
        """Documents of an example."""
        return 1 if self.examples == "texts" else 2

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Document:
        return self.documents[int(self.chosen[index])]

    @cached_property
    def first_of_row(self) -> Numbers:
        """Numbers of the first documents of rows, without repetitions by weight."""
        ordinals = self.documents.ordinals[self.chosen]
        first = np.ones(len(self), dtype=np.bool_)
        first[1:] = ordinals[1:] != ordinals[:-1]
        return self.chosen[first]

    def by_file(self) -> Iterator[tuple[int, Numbers]]:
        """Yield the documents in order, some at a time, with the number of their file."""
        for shard, chosen in self.documents.by_shard(self.chosen):
            yield self.documents.shards[shard].file, chosen

    def origin(self, number: int) -> tuple[str, int]:
        """Return the file and row of document `number` of the corpus."""
        return self.corpus.files[self.documents.file(number)].file, int(self.documents.rows[number])

    def good_answers(self) -> int:
        """Return the number of examples rated as good, repetitions by weight included."""
        return int(self.documents.desirable[self.chosen].sum()) // self.unit

    def distinct_rows(self) -> int:
        """Return the number of rows with different tokens, by digest."""
        firsts = self.first_of_row
        digests = self.documents.digests[firsts]
        if self.examples == "pairs":
            digests = np.uint64(3) * digests + self.documents.digests[firsts + 1]
        return len(np.unique(digests))

    def without_rows(self, ordinals: npt.NDArray[np.uint64]) -> "Split":
        """Return the split without the documents of these rows, which count as dropped."""
        lost = np.isin(self.documents.ordinals[self.chosen], ordinals)
        return replace(
            self,
            chosen=self.chosen[~lost],
            rows_dropped=self.rows_dropped + len(np.unique(ordinals)),
        )


def whole_corpus(
    name: str, corpus: Corpus, documents: Documents, dropped: npt.NDArray[np.int64]
) -> Split:
    """Return a split of all documents of a corpus. dropped: ordinals of the rows that gave none."""
    return _split(name, corpus, documents, dropped, np.ones(corpus.rows_read, dtype=np.bool_))


def divide(
    corpus: Corpus, documents: Documents, dropped: npt.NDArray[np.int64], *, share: float, seed: int
) -> tuple[Split, Split]:
    """Divide a corpus' rows into train and held-out: `share` of all (rounded, at least one), by
    number and `seed` alone. Groups (`Documents.groups`) stay together, as many as fit the share;
    raises `UserError` if there is one alone."""
    count = max(1, round(corpus.rows_read * share))
    is_heldout = np.zeros(corpus.rows_read, dtype=np.bool_)
    if documents.groups.any():
        is_heldout[_drawn_groups(documents, count=count, seed=seed)] = True
    else:
        is_heldout[drawn(count, total=corpus.rows_read, seed=seed)] = True
    return (
        _split("train", corpus, documents, dropped, ~is_heldout),
        _split("heldout", corpus, documents, dropped, is_heldout),
    )


def _drawn_groups(documents: Documents, *, count: int, seed: int) -> npt.NDArray[np.uint64]:
    """Return the rows of groups drawn by `seed`, at most `count` or one group."""
    ordinals, firsts = np.unique(documents.ordinals, return_index=True)
    groups = documents.groups[firsts]
    _, numbers = np.unique(groups, return_inverse=True)
    alone = groups == 0
    numbers[alone] = numbers.max() + 1 + np.arange(np.count_nonzero(alone))
    _, numbers, sizes = np.unique(numbers, return_inverse=True, return_counts=True)
    if len(sizes) == 1:
        raise UserError(
            "data.group_by: all rows of the training data are of one group (the same value in this "
            "column; of preferences without it, the same prompt), so none can be held out. Name a "
            "column that tells groups apart, or give data.heldout."
        )
    order = drawn(len(sizes), total=len(sizes), seed=seed)
    chosen, remaining = np.zeros(len(sizes), dtype=np.bool_), count
    for group, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        if size <= remaining:
            chosen[group], remaining = True, remaining - size
    if remaining == count:
        chosen[sizes.argmin()] = True
    return ordinals[chosen[numbers]]


def weighted(split: Split, *, seed: int) -> Split:
    """Return the split with each document as often as the weight of its source says
    (`times_taken`)."""
    weights = [source.weight for source in split.corpus.sources]
    if set(weights) == {1.0}:
        return split
    times = [
        times_taken(documents // split.unit, weight=weight, source=number, seed=seed)
        for number, (documents, weight) in enumerate(
            zip(documents_by_source(split), weights, strict=True)
        )
    ]
    repeats = np.concatenate(times)  # documents lie in the order of their sources
    units = split.chosen.reshape(-1, split.unit)
    return replace(split, chosen=np.repeat(units, repeats, axis=0).ravel())


def documents_by_source(split: Split) -> list[int]:
    """Return the number of chosen documents of each source."""
    counts, last = [0] * len(split.corpus.sources), 0
    for file, chosen in split.by_file():
        source = split.corpus.files[file].source
        assert source >= last, "documents lie in the order of their sources"
        counts[source] += len(chosen)
        last = source
    return counts


def _split(
    name: str,
    corpus: Corpus,
    documents: Documents,
    dropped: npt.NDArray[np.int64],
    member: npt.NDArray[np.bool_],
) -> Split:
    return Split(
        name=name,
        corpus=corpus,
        documents=documents,
        chosen=np.flatnonzero(member[documents.ordinals]).astype(np.uint32),
        rows_read=int(member.sum()),
        rows_dropped=int(member[dropped].sum()),
    )


def overlap(heldout: Split, train: Split) -> Numbers:
    """Return the held-out documents with the tokens of a training document."""
    own, trained = (split.documents.digests[split.chosen] for split in (heldout, train))
    return heldout.chosen[np.isin(own, trained)]


def shared_groups(heldout: Split, train: Split) -> Iterator[tuple[int, int]]:
    """Yield each held-out document of a group in training, and the group's first one there."""
    own, trained = (split.documents.groups[split.chosen] for split in (heldout, train))
    groups, firsts = np.unique(trained, return_index=True)
    for index in np.flatnonzero((own > 0) & np.isin(own, groups)).tolist():
        first = firsts[np.searchsorted(groups, own[index])]
        yield int(heldout.chosen[index]), int(train.chosen[first])


def check_both_judgements(train: Split) -> None:
    """Raise `UserError` if all rated answers of the training split are good, or all are bad."""
    good, count = train.good_answers(), len(train) // train.unit
    if good in (0, count):
        files = ", ".join(file.file for file in train.corpus.files[:3])
        raise UserError(
            f"data.train: all {count} answers of {files} are {'good' if good else 'bad'} ones, and "
            "KTO learns from the difference. Add the others, name the column that says it in "
            "data.columns.label, or train good answers alone by train.objective: sft."
        )


def check_not_empty(*splits: Split, rejects: Path) -> None:
    """Raise `UserError` if no document of a split is left; `rejects` lists the dropped rows."""
    for split in splits:
        if len(split) == 0:
            reasons = sum((file.dropped_by_reason for file in split.corpus.files), Counter[str]())
            commonest = ", ".join(f"{count}: {reason}" for reason, count in reasons.most_common(3))
            listed = f" ({commonest}; all: {rejects})" if split.rows_dropped else ""
            files = ", ".join(file.file for file in split.corpus.files[:3])
            change = "mend those" if split.rows_dropped else "change data.heldout_share"
            if any("seq_len" in reason for reason in reasons):
                change += ", or raise data.seq_len"
            raise UserError(
                f"data.{split.name}: no document is left for the split {split.name}: "
                f"{split.rows_read} rows of {files} were read for it, {split.rows_dropped} of them "
                f"dropped{listed}. Give it more rows, or {change}."
            )


Integers = npt.NDArray[np.int64]


def with_neighbours(split: Split, *, seq_len: int, work: Path, train: Split) -> Split:
    """Return the split with a neighbour after each document, both at most `seq_len` tokens: the
    same prompt with the answer of another row. Writes shards of the folder `work`. Raises
    `UserError` if an answer has no neighbour.

    KTO estimates from the neighbours how far the model is from its reference (Ethayarajh et al.,
    arXiv 2402.01306, sec. 4.1). The neighbour's answer is the split's next one of another row and
    prompt that differs; the first row follows the last. If a split has none, as a small held-out
    one, it is an answer of `train`. It depends on the data alone."""
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
