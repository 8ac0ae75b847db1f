"""Held-out documents that training repeats, or nearly: each row is dropped with a reason."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from workflow.lib.data.reading.row_chunks import PREVIEW_CHARS, preview, printable
from workflow.lib.data.tokens.repetition.containment import Match, shared_tokens
from workflow.lib.data.tokens.repetition.exchanges import Pieces
from workflow.lib.data.tokens.splits import Split, overlap, shared_groups
from workflow.lib.data.tokens.work_folder import NEAR_DUPLICATE, OVERLAP, SHARED_GROUP, Listing
from workflow.lib.system.errors import UserError, setting_error

Treatment = Literal["remove", "refuse", "keep"]

SHOWN_PAIRS = 3  # near-duplicates that an error message quotes


def drop_overlap(
    train: Split, heldout: Split, listing: Listing, tokenizer: PreTrainedTokenizerBase
) -> Split:
    """Return held-out without the documents whose tokens a training document has."""
    reasons = ((int(number), OVERLAP) for number in overlap(heldout, train))
    return drop_documents(heldout, reasons, listing, tokenizer)


def drop_shared_groups(
    train: Split,
    heldout: Split,
    listing: Listing,
    tokenizer: PreTrainedTokenizerBase,
    *,
    treatment: Treatment,
) -> tuple[Split, int]:
    """Return held-out by `data.near_duplicates`, without rows of a training group, or refuse."""
    first_pairs: dict[int, tuple[int, int]] = {}
    for number, other in shared_groups(heldout, train):
        first_pairs.setdefault(int(heldout.documents.ordinals[number]), (number, other))
    reasons = (
        (number, f"{SHARED_GROUP}: {described(train, other)}")
        for number, other in first_pairs.values()
    )
    return _treated(heldout, reasons, len(first_pairs), listing, tokenizer, treatment), len(
        first_pairs
    )


def drop_near_duplicates(
    heldout: Split,
    train: Split,
    matches: Sequence[Match],
    listing: Listing,
    tokenizer: PreTrainedTokenizerBase,
    *,
    pieces: Pieces,
    treatment: Treatment,
) -> Split:
    """Apply `data.near_duplicates` to held-out rows. A reason names the training row and the shared
    text. Raises `UserError` for `refuse`."""

    def reasons() -> Iterator[tuple[int, str]]:
        for match in matches:
            document, repeated = heldout.documents[match.heldout], train.documents[match.train]
            ids = document[0][shared_tokens(document, repeated, pieces=pieces)].tolist()
            words = printable(str(tokenizer.decode(ids, skip_special_tokens=True)).strip())
            yield (
                match.heldout,
                f"{NEAR_DUPLICATE}: {described(train, match.train)} trains {match.share:.0%} of "
                f"what this row trains, from {words!r} on",
            )

    return _treated(heldout, reasons(), len(matches), listing, tokenizer, treatment)


def _treated(
    heldout: Split,
    reasons: Iterator[tuple[int, str]],
    rows: int,
    listing: Listing,
    tokenizer: PreTrainedTokenizerBase,
    treatment: Treatment,
) -> Split:
    """Return held-out without these rows, or with them, or raise `UserError`."""
    if not rows or treatment == "keep":
        return heldout
    if treatment == "refuse":
        shown = [
            f"row {heldout.origin(number)[1]}: {reason}"
            for number, reason in islice(reasons, SHOWN_PAIRS)
        ]
        raise setting_error(
            "data.near_duplicates",
            "refuse",
            f"{rows} held-out rows belong to training rows or nearly repeat them:\n  "
            + "\n  ".join(shown),
            "Take them out of the held-out data, set remove, or raise "
            "data.near_duplicate_threshold",
        )
    return drop_documents(heldout, reasons, listing, tokenizer)


def check_heldout_left(heldout: Split, listing: Listing, *, rejects: Path) -> None:
    """Raise `UserError` if every held-out row repeats a training row; `rejects` lists them."""
    if len(heldout):
        return
    counts = listing.dropped_by_reason
    equal, nearly, grouped = (counts[r] for r in (OVERLAP, NEAR_DUPLICATE, SHARED_GROUP))
    files = ", ".join(file.file for file in heldout.corpus.files[:3])
    raise UserError(
        f"data.heldout: no document is left for the split heldout: {heldout.rows_read} rows of "
        f"{files} were read for it, {heldout.rows_dropped} of them dropped, {equal} as they equal "
        f"a training row, {nearly} as they nearly repeat one and {grouped} as they are of a group "
        f"of one (what is shared with which row: {rejects}). Hold out rows that are not trained "
        "too: take repetitions out of the data, or keep rows that belong together on one side by "
        "data.group_by. If they are no repetitions, raise data.near_duplicate_threshold or set "
        "data.near_duplicates to keep."
    )


def described(split: Split, number: int) -> str:
    file, row = split.origin(number)
    return f"row {row} of {file}"


def drop_documents(
    split: Split,
    reasons: Iterable[tuple[int, str]],
    listing: Listing,
    tokenizer: PreTrainedTokenizerBase,
) -> Split:
    """Return the split without the rows of these documents; each row is listed once. reasons:
    numbers of documents, ascending, each with its reason."""
    lost, last = array("Q"), None
    for number, reason in reasons:
        ordinal = int(split.documents.ordinals[number])
        if ordinal != last:
            file, row = split.origin(number)
            text = str(tokenizer.decode(split.documents[number][0][:PREVIEW_CHARS].tolist()))
            listing.drop({"row": row, "reason": reason, "preview": preview(text)}, file=file)
            lost.append(ordinal)
        last = ordinal
    return split.without_rows(np.array(lost, dtype=np.uint64))
