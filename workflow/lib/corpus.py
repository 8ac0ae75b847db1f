"""A data file to documents: every row is encoded or dropped with a reason, and counted either way.

A row is *unusable* if it is broken, empty or of a wrong type; too many of them stop the run. A row that
is only too long is dropped or cut as `data.overlong` says, and stops nothing.
"""

import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from workflow.lib.chat import Encoded
from workflow.lib.config import DataConfig
from workflow.lib.dataset import BrokenRow, Row, read_rows
from workflow.lib.documents import Documents
from workflow.lib.errors import setting_error
from workflow.lib.listing import Listing
from workflow.lib.samples import RowError

FIRST_REASONS = 5  # unusable rows that an error message quotes


class TooLongError(RowError):
    """A usable row that does not fit into `seq_len`."""


@dataclass
class Corpus:
    """What became of one file: its documents, and the numbers of its dropped rows."""

    file: str
    rows_read: int = 0
    documents: Documents = field(default_factory=Documents)
    dropped_rows: "array[int]" = field(default_factory=lambda: array("q"))
    unusable: int = 0
    first_reasons: list[str] = field(default_factory=list)
    special_texts: int = 0
    """Documents whose text spells a special token, which was encoded as ordinary text."""


def read_corpus(
    path: Path,
    *,
    file: str,
    setting: str,
    settings: DataConfig,
    encode: Callable[[Row], Encoded],
    listing: Listing,
) -> Corpus:
    """Encode every row of `path`; `file` names it in listings, `setting` is its key for messages."""
    corpus = Corpus(file=file)
    rows = read_rows(path, setting=setting)
    for row in tqdm(rows, desc=setting, unit="row", disable=None, file=sys.stderr):
        corpus.rows_read += 1
        try:
            _keep(corpus, row, settings, encode, listing)
        except RowError as error:
            _drop(corpus, row, error, listing)
    assert corpus.rows_read == len(corpus.documents) + len(corpus.dropped_rows)
    return corpus


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
        listing.cut(file=corpus.file, row=row.number, tokens=length)
    corpus.documents.append(ids, mask, row=row.number, full_length=length)
    corpus.special_texts += encoded.held_special_text


def _drop(corpus: Corpus, row: Row | BrokenRow, error: RowError, listing: Listing) -> None:
    corpus.dropped_rows.append(row.number)
    listing.drop(file=corpus.file, row=row.number, reason=str(error), preview=row.preview)
    if not isinstance(error, TooLongError):
        corpus.unusable += 1
        if len(corpus.first_reasons) < FIRST_REASONS:
            corpus.first_reasons.append(f"row {row.number}: {error}")


def check_rejected_share(corpora: Iterable[Corpus], *, largest: float, rejects: Path) -> None:
    """Raise `UserError` if more than the share `largest` of a file's rows is unusable; `rejects` lists them."""
    for corpus in corpora:
        share = corpus.unusable / max(1, corpus.rows_read)
        if share > largest:
            raise setting_error(
                "data.max_rejected_share",
                largest,
                f"{corpus.unusable} of {corpus.rows_read} rows of {corpus.file} are unusable ({share:.1%}).\n  "
                + "\n  ".join(corpus.first_reasons)
                + f"\nAll of them, with reasons: {rejects}",
                "Mend the rows, or raise the share",
            )
