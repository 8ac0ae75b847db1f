"""The two splits: which documents each one holds, and that no held-out document is also trained on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from workflow.lib.corpus import Corpus
from workflow.lib.documents import Documents
from workflow.lib.errors import UserError
from workflow.lib.mixture import repeated
from workflow.lib.tokens import Document

DIGEST_BYTES = 16  # of a document's token ids: 128 bits, no accidental collision


@dataclass(frozen=True)
class Split(Sequence[Document]):
    """The documents of one split, by their numbers in a corpus, and how many rows it read and dropped.

    A document of a weighted source may be chosen more than once, or not at all.
    """

    name: str
    files: Sequence[str]
    documents: Documents
    chosen: npt.NDArray[np.int64]
    rows_read: int
    rows_dropped: int

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self.documents[int(i)] for i in self.chosen[index]]
        return self.documents[int(self.chosen[index])]

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document as kept."""
        return self.documents.lengths[self.chosen]

    @cached_property
    def full_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document before it was cut."""
        return self.documents.full_lengths[self.chosen]

    def origin(self, place: int) -> tuple[str, int]:
        """Return the file and row that the document at `place` came from."""
        number = self.chosen[place]
        file = self.files[self.documents.files[number]]
        return file, int(self.documents.rows[number])

    @cached_property
    def digests(self) -> list[bytes]:
        """A digest of each document's token ids."""
        return [
            hashlib.blake2b(ids.tobytes(), digest_size=DIGEST_BYTES).digest() for ids, _ in self
        ]

    @property
    def duplicates(self) -> int:
        """Documents whose tokens equal those of an earlier one of the split, their repetitions by weight not counted."""
        return len(np.unique(self.chosen)) - len(set(self.digests))

    def facts(self) -> dict[str, Any]:
        """Return the manifest's facts on the documents; every row read is kept or dropped."""
        return {
            "rows_read": self.rows_read,
            "rows_kept": self.rows_read - self.rows_dropped,
            "rows_dropped": self.rows_dropped,
            "documents": len(self),
            "truncated": int((self.full_lengths > self.lengths).sum()),
            "tokens": int(self.lengths.sum()),
            "trained_tokens": sum(int(mask.sum()) for _, mask in self),
            "length_percentiles": _percentiles(self.full_lengths),
            "duplicates": self.duplicates,
        }


def whole_corpus(name: str, corpus: Corpus) -> Split:
    """Return a split of all documents of a corpus."""
    return _split(name, corpus, np.arange(corpus.rows_read))


def divide(corpus: Corpus, *, share: float, seed: int) -> tuple[Split, Split]:
    """Divide a corpus' rows into train and held-out: `share` of all rows (rounded, at least one) is held out.

    Which rows is a pure function of their number and `seed`, whatever their content.
    """
    order = np.random.Generator(np.random.PCG64(seed)).permutation(corpus.rows_read)
    count = max(1, round(corpus.rows_read * share))
    return _split("train", corpus, order[count:]), _split("heldout", corpus, order[:count])


def weighted(split: Split, corpus: Corpus, *, seed: int) -> Split:
    """Return the split as an epoch takes it: each source's documents as often as its weight says."""
    weights = [source.weight for source in corpus.sources]
    sources = corpus.source_of_documents[split.chosen]
    return replace(split, chosen=split.chosen[repeated(sources, weights=weights, seed=seed)])


def _split(name: str, corpus: Corpus, numbers: npt.NDArray[np.int64]) -> Split:
    dropped = np.isin(np.array(corpus.dropped, dtype=np.int64), numbers)
    chosen = np.flatnonzero(np.isin(corpus.documents.ordinals, numbers))
    assert len(numbers) == len(chosen) + dropped.sum(), f"{name}: rows went missing"
    return Split(
        name=name,
        files=[file.file for file in corpus.files],
        documents=corpus.documents,
        chosen=chosen,
        rows_read=len(numbers),
        rows_dropped=int(dropped.sum()),
    )


def without_overlap(heldout: Split, train: Split) -> tuple[Split, list[int]]:
    """Return `heldout` without the documents whose tokens a training document has, and their places in it."""
    known = set(train.digests)
    places = [place for place, digest in enumerate(heldout.digests) if digest in known]
    kept = np.delete(heldout.chosen, places)
    dropped = heldout.rows_dropped + len(places)
    return replace(heldout, chosen=kept, rows_dropped=dropped), places


def check_not_empty(*splits: Split, rejects: Path) -> None:
    """Raise `UserError` if no document of a split is left; `rejects` lists the dropped rows."""
    for split in splits:
        if len(split) == 0:
            listed = f" (listed with reasons: {rejects})" if split.rows_dropped else ""
            raise UserError(
                f"data.{split.name}: no document is left for the split {split.name}: {split.rows_read} rows of "
                f"{', '.join(split.files[:3])} were read for it, {split.rows_dropped} of them dropped{listed}. "
                "Give it more rows, or mend those."
            )


def _percentiles(lengths: npt.NDArray[np.int64]) -> dict[str, int]:
    """Return lengths that occur, tokens: the smallest that is not below the given share of documents."""
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99], method="inverted_cdf")
    return {"p50": int(p50), "p90": int(p90), "p99": int(p99), "max": int(lengths.max())}
