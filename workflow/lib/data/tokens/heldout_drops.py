"""Held-out documents that training repeats, or nearly: each row is dropped with a reason."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
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
Reason = tuple[int, str]
"""The number of a held-out document, and why its row is dropped."""

SHOWN_PAIRS = 3  # near-duplicates that an error message quotes


def overlap_reasons(heldout: Split, train: Split) -> Iterator[Reason]:
    """Yield the documents whose tokens a training document has."""
    return ((number, OVERLAP) for number in overlap(heldout, train).tolist())


def group_reasons(heldout: Split, train: Split) -> list[Reason]:
    """Return a document of each row of a training group, with a row of that."""
    first_reasons: dict[int, Reason] = {}
    for number, other in shared_groups(heldout, train):
        reason = number, f"{SHARED_GROUP}: {described(train, other)}"
        first_reasons.setdefault(int(heldout.documents.ordinals[number]), reason)
    return list(first_reasons.values())


def near_reasons(
    heldout: Split,
    train: Split,
    matches: Sequence[Match],
    tokenizer: PreTrainedTokenizerBase,
    *,
    pieces: Pieces,
) -> Iterator[Reason]:
    """Yield the held-out document of each match, with the training row and the shared text."""
    for match in matches:
        document, repeated = heldout.documents[match.heldout], train.documents[match.train]
        ids = document[0][shared_tokens(document, repeated, pieces=pieces)].tolist()
        words = printable(str(tokenizer.decode(ids, skip_special_tokens=True)).strip())
        yield (
            match.heldout,
            f"{NEAR_DUPLICATE}: {described(train, match.train)} trains {match.share:.0%} of "
            f"what this row trains, from {words!r} on",
        )


def treated(
    heldout: Split,
    reasons: Iterable[Reason],
    listing: Listing,
    tokenizer: PreTrainedTokenizerBase,
    *,
    treatment: Treatment,
) -> Split:
    """Return held-out without the rows of these documents or with them, by `data.near_duplicates`;
    raises `UserError` to refuse them."""
    if treatment == "keep":
        return heldout
    if treatment == "remove":
        return drop_documents(heldout, reasons, listing, tokenizer)
    refused = [f"row {heldout.origin(number)[1]}: {reason}" for number, reason in reasons]
    if refused:
        raise setting_error(
            "data.near_duplicates",
            "refuse",
            f"{len(refused)} held-out rows belong to training rows or nearly repeat them:\n  "
            + "\n  ".join(refused[:SHOWN_PAIRS]),
            "Take them out of the held-out data, set remove, or raise "
            "data.near_duplicate_threshold",
        )
    return heldout


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
    reasons: Iterable[Reason],
    listing: Listing,
    tokenizer: PreTrainedTokenizerBase,
) -> Split:
    """Return the split without the rows of these ascending documents; each row is listed once."""
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
