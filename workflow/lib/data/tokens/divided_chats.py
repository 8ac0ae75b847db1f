"""Chats that are longer than a row, divided before questions (`data.overlong: split`).

Each part has the system text, and begins with a user's message: a part of an answer without its
prompt would teach a model to begin in the middle. Parts are as long as fits."""

from bisect import bisect_right
from dataclasses import replace

from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.row_formats import Sample, Weighted
from workflow.lib.data.encoding.sample_encoder import Encoded, SampleEncoder
from workflow.lib.data.tokens.overlong import TooLongError


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

        kept = [*range(self._head), *range(ends[first], ends[stop])]
        weights = self._chat.weights
        return replace(
            self._chat,
            messages=[self._chat.messages[n] for n in kept],
            trained=[self._chat.trained[n] for n in kept],
            weights=None if weights is None else [weights[n] for n in kept],
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
