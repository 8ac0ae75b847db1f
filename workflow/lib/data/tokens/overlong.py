"""Examples that do not fit into `seq_len`: cut, divided or dropped, as `data.overlong` says.

A pair has to fit into one row, so the longer answer is cut first. A rated answer takes half a row
at most: the other half is for the same prompt with the answer of another row (`splits`). A chat
is divided before questions; each part has the system text, and begins with a user's message, since
a part of an answer without its prompt would teach a model to begin in the middle."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.row_formats import Sample, Weighted
from workflow.lib.data.encoding.row_values import RowError, UnwantedRowError
from workflow.lib.data.encoding.sample_encoder import Encoded, SampleEncoder
from workflow.lib.settings.data import Overlong
from workflow.lib.settings.objectives import Examples


@dataclass(frozen=True)
class Begun:
    """A row whose encoding has begun. encode: returns its examples. divide: returns a long chat in
    parts (`data.overlong: split`). Both raise `RowError`."""

    encode: Callable[[], list[Encoded]]
    divide: Callable[[], list[Encoded]] | None = None


class OverlongError(UnwantedRowError):
    """A row longer than `seq_len`, which `data.overlong: drop` leaves out."""


class TooLongError(RowError):
    """No token of the row would be trained within `seq_len`. needed: tokens that would hold the
    row."""

    def __init__(self, reason: str, *, needed: int) -> None:
        super().__init__(f"{reason}; data.seq_len: {needed} holds it")
        self.needed = needed


def tokens_needed(examples: Sequence[Encoded], kind: Examples) -> int:
    """Return the tokens of a packed row that a row's largest example takes, uncut."""
    lengths = [len(encoded.ids) for encoded in examples]
    return {"texts": max(lengths), "pairs": sum(lengths), "rated": 2 * max(lengths)}[kind]


def _texts(examples: Sequence[Encoded], *, seq_len: int, overlong: Overlong) -> list[Encoded]:
    """Cut each by itself. Raises `TooLongError` if none is left, `OverlongError` if one must be
    dropped."""
    pieces: list[Encoded] = []
    failure: TooLongError | None = None
    for encoded in examples:
        try:
            pieces += cut_to_length(encoded, seq_len=seq_len, overlong=overlong)
        except TooLongError as error:
            failure = error
    if failure is not None and not pieces:
        raise failure
    return pieces


def _pair(examples: Sequence[Encoded], *, seq_len: int, overlong: Overlong) -> list[Encoded]:
    lengths = [len(encoded.ids) for encoded in examples]
    if sum(lengths) > seq_len and overlong == "drop":
        raise OverlongError(
            f"overlong: chosen and rejected have {lengths[0]} and {lengths[1]} tokens, and one row "
            f"(seq_len = {seq_len}) holds both"
        )
    longest = max(seq_len // 2, seq_len - min(lengths))
    share = f"chosen and rejected share a row of data.seq_len = {seq_len} tokens"
    pair = [
        cut(encoded, longest, needed=sum(lengths), why=f"{share}, so each keeps {longest}")
        for encoded in examples
    ]
    if np.array_equal(pair[0].ids, pair[1].ids):
        reason = f"equal within seq_len: {share}, and begin alike for {longest}"
        raise TooLongError(reason, needed=sum(lengths))
    return pair


def _rated(examples: Sequence[Encoded], *, seq_len: int, overlong: Overlong) -> list[Encoded]:
    half, longest = seq_len // 2, max(len(encoded.ids) for encoded in examples)
    if longest > half and overlong == "drop":
        raise OverlongError(
            f"overlong: {longest} tokens, and a rated answer may take half a row (seq_len = "
            f"{seq_len})"
        )
    share = f"two answers share a row of data.seq_len = {seq_len} tokens, so each keeps {half}"
    return [cut(encoded, half, needed=2 * longest, why=share) for encoded in examples]


CUT: dict[Examples, Callable[..., list[Encoded]]] = {
    "texts": _texts,
    "pairs": _pair,
    "rated": _rated,
}


def cut_to_length(encoded: Encoded, *, seq_len: int, overlong: Overlong) -> list[Encoded]:
    """Return a row's documents of at most `seq_len` tokens: one, or with `split` the parts of a
    text. Raises `TooLongError` if that leaves none, `OverlongError` if it must be dropped."""
    length = len(encoded.ids)
    if length <= seq_len:
        return [encoded]
    if overlong == "drop":
        raise OverlongError(f"overlong: {length} tokens, seq_len is {seq_len}")
    if overlong == "truncate":
        return [cut(encoded, seq_len, needed=length, why=f"data.seq_len is {seq_len}")]
    if not encoded.mask[1:].all():
        raise TooLongError(
            f"no cut: {length} tokens, data.seq_len is {seq_len}, and a part of an answer would "
            "have no prompt",
            needed=length,
        )
    pieces = [part_of(encoded, start, start + seq_len) for start in range(0, length, seq_len)]
    return [piece for piece in pieces if piece.mask.any()]


def cut(encoded: Encoded, length: int, *, needed: int, why: str) -> Encoded:
    """Return the first `length` tokens. Raises `TooLongError` if none of them is trained, which
    tells `why` there are so few, and the tokens `needed`."""
    piece = part_of(encoded, 0, length)
    if not piece.mask.any():
        prompt = int(encoded.mask.argmax())
        reason = f"no trained token within seq_len: {prompt} tokens come before the first; {why}"
        raise TooLongError(reason, needed=needed)
    return piece


def part_of(encoded: Encoded, start: int, stop: int) -> Encoded:
    """Return the tokens [start, stop) as a document; its first token is no target."""
    part = slice(start, stop)
    weights = None if encoded.weights is None else encoded.weights[part].copy()
    piece = replace(
        encoded,
        ids=encoded.ids[part],
        mask=encoded.mask[part].copy(),
        weights=weights,
        composed=None if encoded.composed is None else encoded.composed[part],
    )
    piece.mask[0] = False
    if weights is not None:
        weights[0] = 0.0
    return piece


def divide_chat(
    encoder: SampleEncoder, sample: Sample, *, seq_len: int, last_turn: bool
) -> list[Encoded]:
    """Return the documents of a chat's parts, each of at most `seq_len` tokens. last_turn: only the
    chat's last turn is trained. Raises `TooLongError` if one question with its answers has more
    tokens, `RowError` as `encode`."""
    if isinstance(sample, Weighted):
        parts = divide_chat(encoder, sample.sample, seq_len=seq_len, last_turn=last_turn)
        return [encoded.weighted(sample.weight) for encoded in parts]
    assert isinstance(sample, Conversation), "other samples have no turns"
    if last_turn:
        last = len(sample.trained) - 1 - sample.trained[::-1].index(True)
        sample = replace(sample, trained=[n == last for n in range(len(sample.trained))])
    chat = _DividedChat(encoder, sample)
    documents: list[Encoded] = []
    first, count = 0, len(chat.starts)
    while first < count:
        stop = chat.last_that_fits(first, seq_len)
        if stop == first:
            length = chat.length(first, first + 1)
            raise TooLongError(
                f"no cut between turns: message {chat.starts[first] + 1} and its answers have "
                f"{length} tokens, data.seq_len is {seq_len}, and data.overlong: split divides a "
                "chat before a question alone",
                needed=length,
            )
        part = chat.part(first, stop)
        documents += encoder.encode(part) if any(part.trained) else []
        first = stop
    return documents


class _DividedChat:
    """A chat as its system text and questions with their answers, which begin at `starts`."""

    def __init__(self, encoder: SampleEncoder, chat: Conversation) -> None:
        self._encoder = encoder
        self._chat = chat
        roles = [message["role"] for message in chat.messages]
        self._head = next((n for n, role in enumerate(roles) if role != "system"), len(roles))
        asks = [n for n in range(self._head + 1, len(roles)) if roles[n] == "user" != roles[n - 1]]
        self.starts = [self._head, *asks]

    def part(self, first: int, stop: int) -> Conversation:
        """Return the system text and the questions [first, stop)."""
        ends = [*self.starts, len(self._chat.messages)]

        numbers = [*range(self._head), *range(ends[first], ends[stop])]
        weights = self._chat.weights
        return replace(
            self._chat,
            messages=[self._chat.messages[n] for n in numbers],
            trained=[self._chat.trained[n] for n in numbers],
            weights=None if weights is None else [weights[n] for n in numbers],
        )

    def length(self, first: int, stop: int) -> int:
        """Return the tokens of a part's longest document; 0 if no turn of it is trained."""
        part = self.part(first, stop)
        return max(len(e.ids) for e in self._encoder.encode(part)) if any(part.trained) else 0

    def last_that_fits(self, first: int, seq_len: int) -> int:
        """Return the end of the longest part from `first` on; `first` if none fits."""
        count, step = len(self.starts), 1
        while first + step < count and self.length(first, first + step) <= seq_len:
            step *= 2
        stops = range(first + 1, min(first + step, count) + 1)
        return first + bisect_right(stops, seq_len, key=lambda stop: self.length(first, stop))
