"""Text to token ids and their places by the tokenizers library, a long text in pieces.

The library takes 200 bytes of memory for a character (0.23.3, 2.6 million characters, 2026-11-29).
The pieces' tokens are those of the whole text: a piece begins behind a word of the one before, as
pre-tokenizers read from left to right, and no model joins their words. A tokenizer for which that
is wrong is noticed: it knows no words, or two pieces differ in the tokens behind a cut, which both
have. Then the text is encoded as a whole."""

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from workflow.lib.system.limits import WatchedWork

EXCESS = (
    "model.source: its tokenizer {excess} for one text, which begins with {item}. Take its "
    "tokenizer.json from its source again, name another model, or remove that text."
)
# Bounds of one text: a tokenizer takes 2 µs and 200 bytes of memory for a character.
MIN_SECONDS, SECONDS_PER_CHAR = 60.0, 2e-5
MIN_BYTES, BYTES_PER_CHAR = 2**30, 256
PIECE_CHARS = 2**16
SHARED_CHARS = 2**10  # behind a cut: of both pieces
# Offsets of tokens may leave out blanks at an end, but no letter.
WORD_END = re.compile(r"[^\W_][\W_]")
Ids: TypeAlias = "array[int]"  # of tokens, 4 bytes each


class TextEncoding(NamedTuple):
    """Token ids of a text. span: the characters [first, stop) of a token, by its number."""

    ids: Ids
    span: Callable[[int], tuple[int, int]]

    def first_from(self, start: int, *, lo: int = 0) -> int:
        """Return the first token from `lo` on that begins at the character `start` or behind it, by
        bisection: a list of all offsets takes ten times as long."""
        return bisect_left(range(len(self.ids)), start, lo=lo, key=lambda n: self.span(n)[0])


def encoding(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> TextEncoding:
    """Return the encoding of a text. Raises `UserError` if the tokenizer fails."""
    if len(text) > PIECE_CHARS and not add_special_tokens:
        pieced = _in_pieces(tokenizer, text)
        if pieced is not None:
            return pieced
    whole = _encoded(tokenizer, text, add_special_tokens=add_special_tokens)
    return TextEncoding(array("I", whole.ids), whole.token_to_chars)  # type: ignore[arg-type]


def _in_pieces(tokenizer: Tokenizer, text: str) -> TextEncoding | None:
    """Return the encoding of a text, in 12 bytes a token; None if pieces have other tokens."""
    ids, shared = array("I"), array("I")
    offsets: list[npt.NDArray[np.uint32]] = []
    start = 0
    while start < len(text):
        piece_text = text[start : start + PIECE_CHARS]
        piece = _encoded(tokenizer, piece_text)
        piece_ids, spans = array("I", piece.ids), np.array(piece.offsets, dtype=np.uint32)
        if piece_ids[: len(shared)] != shared:
            return None
        cut, stop = len(piece_ids), len(piece_text)
        if start + stop < len(text):
            ends = _word_ends(piece_text, piece)
            last = next(islice(ends, 1, None), 0)  # the very last word may go on behind the piece
            cut = next((n for n in ends if spans[n - 1, 1] <= PIECE_CHARS - SHARED_CHARS), 0)
            if not cut:
                return None
            stop, shared = int(spans[cut - 1, 1]), piece_ids[cut:last]
        ids += piece_ids[:cut]
        offsets.append(spans[:cut] + np.uint32(start))
        start += stop
    spans = np.concatenate(offsets)
    return TextEncoding(ids, lambda token: (int(spans[token, 0]), int(spans[token, 1])))


def _word_ends(text: str, encoded: Encoding) -> Iterator[int]:
    """Yield the numbers of tokens behind words that end with a letter or a digit, from the last
    one."""
    words, spans = encoded.word_ids, encoded.offsets
    for number in range(len(words) - 1, 0, -1):
        end = spans[number - 1][1]
        if words[number] != words[number - 1] and WORD_END.fullmatch(text, end - 1, end + 1):
            yield number


def _encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """Raises `UserError` if the tokenizer fails: a defect of a regular expression is a panic of
    Rust, which is no `Exception`."""
    size = len(text)
    work = WatchedWork(
        EXCESS,
        text,
        seconds=MIN_SECONDS + SECONDS_PER_CHAR * size,
        num_bytes=MIN_BYTES + BYTES_PER_CHAR * size,
    )
    try:
        with work:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise work.error(f"fails ({type(error).__name__}: {error})") from None
