"""Held-out documents that are also trained on, or nearly: dropped, each row with its reason."""

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from workflow.lib.data.reading.row import PREVIEW_CHARS, preview
from workflow.lib.data.tokens.dropped_rows import NEAR_DUPLICATE, OVERLAP, Listing
from workflow.lib.data.tokens.near_duplicates import NearDuplicates
from workflow.lib.data.tokens.splits import Split, overlap
from workflow.lib.system.errors import setting_error

SHOWN_PAIRS = 3  # near-duplicates that an error message quotes


def drop_overlap(
    train: Split, heldout: Split, listing: Listing, tokenizer: PreTrainedTokenizerBase
) -> Split:
    """Return held-out without the rows that are also trained on."""
    reasons = ((int(number), OVERLAP) for number in overlap(heldout, train))
    return drop_documents(heldout, reasons, listing, tokenizer)


def drop_near_duplicates(
    heldout: Split,
    train: Split,
    near: NearDuplicates,
    listing: Listing,
    tokenizer: PreTrainedTokenizerBase,
    *,
    treatment: Literal["remove", "refuse", "keep"],
) -> Split:
    """Return held-out as `data.near_duplicates` says. Raises `UserError` if they are refused."""
    if not near.pairs or treatment == "keep":
        return heldout
    reasons = near_reasons(near, train)
    if treatment == "refuse":
        shown = [
            f"row {heldout.origin(number)[1]}: {reason}"
            for number, reason in islice(reasons, SHOWN_PAIRS)
        ]
        raise setting_error(
            "data.near_duplicates",
            "refuse",
            f"{len(near.pairs)} held-out rows nearly repeat training rows:\n  "
            + "\n  ".join(shown),
            "Take them out of the held-out data, set remove, or raise "
            "data.near_duplicate_threshold",
        )
    return drop_documents(heldout, reasons, listing, tokenizer)


def near_reasons(near: NearDuplicates, train: Split) -> Iterator[tuple[int, str]]:
    """Yield each held-out document that resembles a training one, and which."""
    for number, other, measured in near.pairs:
        file, row = train.origin(other)
        yield number, f"{NEAR_DUPLICATE}: {measured:.2f} like row {row} of {file}"


def drop_documents(
    split: Split,
    reasons: Iterable[tuple[int, str]],
    listing: Listing,
    tokenizer: PreTrainedTokenizerBase,
) -> Split:
    """Return the split without the rows of these documents; each row is listed once.

    reasons: numbers of documents, ascending, each with why it is dropped.
    """
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
