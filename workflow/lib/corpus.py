"""The files of a split to documents: every row is encoded or dropped with a reason, and counted either way.

A row is *unusable* if it is broken, empty or of a wrong type; too many of them stop the run. A row that
is only too long is dropped or cut as `data.overlong` says, and stops nothing.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from workflow.lib.chat import Encoded
from workflow.lib.config import DataConfig
from workflow.lib.dataset import read_rows
from workflow.lib.documents import Documents
from workflow.lib.errors import setting_error
from workflow.lib.listing import Listing
from workflow.lib.messages import RowError
from workflow.lib.rows import BrokenRow, Row
from workflow.lib.sources import Source, SourceFile

FIRST_REASONS = 5  # unusable rows that an error message quotes


class TooLongError(RowError):
    """A usable row that does not fit into `seq_len`."""


@dataclass
class FileRows:
    """What was read of one file of a source."""

    source: int
    path: Path
    file: str
    rows_read: int = 0
    unusable: int = 0
    first_reasons: list[str] = field(default_factory=list)
    special_texts: int = 0
    """Documents whose text spells a special token, which was encoded as ordinary text."""


@dataclass
class Corpus:
    """What became of the files of one split: its documents, and the numbers of its dropped rows among all read."""

    sources: list[Source]
    files: list[FileRows] = field(default_factory=list)
    rows_read: int = 0
    documents: Documents = field(default_factory=Documents)
    dropped: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def source_of_documents(self) -> npt.NDArray[np.int64]:
        """Number of the source that each document came from, shape (documents,)."""
        return np.array([file.source for file in self.files], dtype=np.int64)[self.documents.files]


def read_corpus(
    encoders: Mapping[Source, Callable[[Row], Encoded]],
    *,
    setting: str,
    settings: DataConfig,
    listing: Listing,
) -> Corpus:
    """Encode every row of the sources, each by its own encoder; `setting` is their key for messages."""
    corpus = Corpus(sources=list(encoders))
    for number, (source, encode) in enumerate(encoders.items()):
        for file in source.files:
            corpus.files.append(FileRows(source=number, path=file.path, file=file.file))
            _read_file(corpus, file, setting, settings, encode, listing)
    assert corpus.rows_read == len(corpus.documents) + len(corpus.dropped)
    return corpus


def _read_file(
    corpus: Corpus,
    file: SourceFile,
    setting: str,
    settings: DataConfig,
    encode: Callable[[Row], Encoded],
    listing: Listing,
) -> None:
    rows = read_rows(file.path, setting=setting, file_type=file.file_type)
    for row in tqdm(rows, desc=file.file, unit="row", disable=None, file=sys.stderr):
        corpus.rows_read += 1
        corpus.files[-1].rows_read += 1
        try:
            _keep(corpus, row, settings, encode, listing)
        except RowError as error:
            _drop(corpus, row, error, listing)


def _keep(
    corpus: Corpus,
    row: Row | BrokenRow,
    settings: DataConfig,
    encode: Callable[[Row], Encoded],
    listing: Listing,
) -> None:
    """Add a row's document, cut if need be. Raises `RowError` if there is none."""
    if isinstance(row, BrokenRow):
        raise RowError(row.reason)
    encoded = encode(row)
    ids, mask, length = encoded.ids, encoded.mask, len(encoded.ids)
    if length > settings.seq_len:
        if settings.overlong == "drop":
            raise TooLongError(f"overlong: {length} tokens, seq_len is {settings.seq_len}")
        ids, mask = ids[: settings.seq_len], mask[: settings.seq_len]
        if not mask.any():
            raise TooLongError(f"no trained token within seq_len: {length} tokens in all")
        listing.cut(file=corpus.files[-1].file, row=row.number, tokens=length)
    corpus.documents.append(
        ids,
        mask,
        file=len(corpus.files) - 1,
        row=row.number,
        ordinal=corpus.rows_read - 1,
        full_length=length,
    )
    corpus.files[-1].special_texts += encoded.held_special_text


def _drop(corpus: Corpus, row: Row | BrokenRow, error: RowError, listing: Listing) -> None:
    file = corpus.files[-1]
    corpus.dropped.append(corpus.rows_read - 1)
    listing.drop(file=file.file, row=row.number, reason=str(error), preview=row.preview)
    if not isinstance(error, TooLongError):
        file.unusable += 1
        if len(file.first_reasons) < FIRST_REASONS:
            file.first_reasons.append(f"row {row.number}: {error}")


def check_rejected_share(corpora: Iterable[Corpus], *, largest: float, rejects: Path) -> None:
    """Raise `UserError` if more than the share `largest` of a file's rows is unusable; `rejects` lists them."""
    for file in (file for corpus in corpora for file in corpus.files):
        share = file.unusable / max(1, file.rows_read)
        if share > largest:
            raise setting_error(
                "data.max_rejected_share",
                largest,
                f"{file.unusable} of {file.rows_read} rows of {file.file} are unusable ({share:.1%}).\n  "
                + "\n  ".join(file.first_reasons)
                + f"\nAll of them, with reasons: {rejects}",
                "Mend the rows, or raise the share",
            )
