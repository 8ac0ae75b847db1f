"""Splits on disk of documents that a test writes down, as token ids or as words."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workflow.lib.data.encoding.keys_read import KeyAudit
from workflow.lib.data.encoding.sample_encoder import Encoded
from workflow.lib.data.reading.row_chunks import Row
from workflow.lib.data.tokens.corpus import Corpus
from workflow.lib.data.tokens.encoded_shards import Documents, Shard, encode_rows, read_facts
from workflow.lib.data.tokens.overlong import Begun
from workflow.lib.data.tokens.repetition.exchanges import Pieces
from workflow.lib.data.tokens.splits import Split, whole_corpus

PER_SHARD = 7
Document = tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]
Turn = tuple[str, str]
"""What stands before an answer, and the answer."""


def split_of(folder: Path, name: str, documents: Sequence[Document]) -> Split:
    """Write documents, each a row, to shards of seven."""

    def encode(row: Row) -> list[Encoded]:
        ids, mask = documents[row.number]
        return [Encoded(ids, mask, held_special_text=False)]

    shards = []
    for first in range(0, len(documents), PER_SHARD):
        rows = [Row(n, {}) for n in range(first, min(first + PER_SHARD, len(documents)))]
        stem = folder / f"{name}-{first}"
        encode_rows(
            rows,
            begin=lambda row: Begun(partial(encode, row)),
            keys=KeyAudit(),
            seq_len=5000,
            overlong="drop",
            stem=stem,
        )
        facts = read_facts(stem)
        shards.append(Shard(stem, 0, first, facts.rows_read, facts.documents, facts.tokens))
    corpus = Corpus(sources=[], files=[], shards=shards, rows_read=len(documents))
    return whole_corpus(name, corpus, Documents(shards), np.empty(0, dtype=np.int64))


def separate(tokens: int) -> Pieces:
    """Pieces of which each is a word; token 0 is none."""
    no = np.zeros(tokens, dtype=np.bool_)
    return Pieces(np.arange(tokens, dtype=np.uint64), np.ones(tokens, dtype=np.int64), no, no)


class Words:
    """Numbers words from 1 on; 0 begins and ends every turn and is no word."""

    def __init__(self) -> None:
        self._numbers = {}

    def conversation(self, *turns: Turn) -> Document:
        """The document of some turns, of which the answers are trained."""
        ids, mask = [0], [False]
        for parts in turns:
            for text, trained in zip(parts, (False, True), strict=True):
                words = [self._numbers.setdefault(w, len(self._numbers) + 1) for w in text.split()]
                ids += [*words, 0]
                mask += [trained] * (len(words) + 1)
        return np.array(ids, dtype=np.uint32), np.array(mask)

    @property
    def pieces(self) -> Pieces:
        """Every token is a word of its own."""
        return separate(len(self._numbers) + 1)
