"""Examples that do not fit into `seq_len`: cut, divided or dropped, as `data.overlong` says.

A pair has to fit into one row, so the longer answer is cut first. A rated answer takes half a row
at most: the other half is for the same prompt with the answer of another row (`neighbours`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from workflow.lib.data.encoding.row_values import UnwantedRowError
from workflow.lib.data.encoding.sample_encoder import Encoded
from workflow.lib.settings.objectives import Examples

Overlong = Literal["truncate", "split", "drop"]


class TooLongError(UnwantedRowError):
    """A usable row that does not fit into `seq_len`."""


def tokens_needed(examples: Sequence[Encoded], kind: Examples) -> int:
    """Return the tokens of a packed row that a row's largest example takes, uncut."""
    lengths = [len(encoded.ids) for encoded in examples]
    return {"texts": max(lengths), "pairs": sum(lengths), "rated": 2 * max(lengths)}[kind]


def _texts(examples: Sequence[Encoded], *, seq_len: int, overlong: Overlong) -> list[Encoded]:
    """Cut each by itself. Raises `TooLongError` if none is left, or one must be dropped."""
    pieces: list[Encoded] = []
    failure: TooLongError | None = None
    for encoded in examples:
        try:
            pieces += cut_to_length(encoded, seq_len=seq_len, overlong=overlong)
        except TooLongError as error:
            failure = error
    if failure is not None and (not pieces or overlong == "drop"):
        raise failure
    return pieces


def _pair(examples: Sequence[Encoded], *, seq_len: int, overlong: Overlong) -> list[Encoded]:
    lengths = [len(encoded.ids) for encoded in examples]
    if sum(lengths) > seq_len and overlong == "drop":
        raise TooLongError(
            f"overlong: chosen and rejected have {lengths[0]} and {lengths[1]} tokens, and one row "
            f"(seq_len = {seq_len}) holds both"
        )
    longest = max(seq_len // 2, seq_len - min(lengths))
    chosen, rejected = (
        piece
        for encoded in examples
        for piece in cut_to_length(encoded, seq_len=longest, overlong="truncate")
    )
    if np.array_equal(chosen.ids, rejected.ids):
        raise TooLongError(f"equal within seq_len: both answers begin alike for {longest} tokens")
    return [chosen, rejected]


def _rated(examples: Sequence[Encoded], *, seq_len: int, overlong: Overlong) -> list[Encoded]:
    half, longest = seq_len // 2, max(len(encoded.ids) for encoded in examples)
    if longest > half and overlong == "drop":
        raise TooLongError(
            f"overlong: {longest} tokens, and a rated answer may take half a row (seq_len = "
            f"{seq_len})"
        )
    return [
        piece
        for encoded in examples
        for piece in cut_to_length(encoded, seq_len=half, overlong="truncate")
    ]


CUT: dict[Examples, Callable[..., list[Encoded]]] = {
    "texts": _texts,
    "pairs": _pair,
    "rated": _rated,
}


def cut_to_length(encoded: Encoded, *, seq_len: int, overlong: Overlong) -> list[Encoded]:
    """Return a row's documents of at most `seq_len` tokens: one, or with `split` all that train a
    token (no first token is a target). Raises `TooLongError` if there is none."""
    ids, mask, weights = encoded.ids, encoded.mask, encoded.weights
    if len(ids) <= seq_len:
        return [encoded]
    if overlong == "drop":
        raise TooLongError(f"overlong: {len(ids)} tokens, seq_len is {seq_len}")
    starts = range(0, len(ids), seq_len) if overlong == "split" else range(1)
    parts = [slice(start, start + seq_len) for start in starts]
    pieces = [
        replace(
            encoded,
            ids=ids[part],
            mask=mask[part].copy(),
            weights=None if weights is None else weights[part].copy(),
        )
        for part in parts
    ]
    for piece in pieces:
        piece.mask[0] = False
        if piece.weights is not None:
            piece.weights[0] = 0.0
    trained_pieces = [piece for piece in pieces if piece.mask.any()]
    if not trained_pieces:
        raise TooLongError(f"no trained token within seq_len: {len(ids)} tokens in all")
    return trained_pieces
