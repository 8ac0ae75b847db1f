"""Texts of a conversation's beginnings: each turn's prompt, and the text up to that turn's end.

To render every beginning of n messages takes the time of n^2 / 2. But a further message changes the
end of a text alone: templates leave out the reasoning of the turn before, say. So texts of a long
conversation follow from those of a *window*, which has its first and its last messages: the change
of the window's text is made in the long text. A template for which that is wrong is noticed: the
change must begin behind the window's first message, the whole conversation's text must come out,
and texts of some turns, the first of each kind among them, are rendered whole and compared."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from workflow.lib.data.encoding.chat_template import Spans
from workflow.lib.data.encoding.message_forms import Message
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.safe_encoder import shared_length
from workflow.lib.data.encoding.template_texts import message_kind

WINDOW = 8  # messages of a window at first; it grows to twice as many
# Roles around the gap of a window, so that templates take it as a conversation.
GAPS = (("assistant", "user"), ("tool", "assistant"))
MAX_KINDS = 4096

Render = Callable[[list[Message], bool], tuple[str, Spans]]
"""Render messages, and the prompt of the next one if the flag is set."""


class WindowError(Exception):
    """A window's text does not tell the text of the conversation."""


class _Text(NamedTuple):
    """The text of a beginning and of its window; blocks: of `text`, right behind the window's first
    message."""

    text: str
    window: str
    blocks: Spans


class Beginnings:
    """Renders the beginnings of a conversation in ascending order. windowed: from windows, which
    may raise `WindowError`; compared: kinds of turns that were compared, in any conversation."""

    def __init__(
        self, render: Render, messages: list[Message], *, windowed: bool, compared: set[Hashable]
    ) -> None:
        self._render = render
        self._messages = messages
        self._compared = compared
        # Numbers of messages before which a window may go on.
        self._gaps = _gaps(messages) if windowed else []
        self._head = self._start = self._gaps[0] if self._gaps else 0
        self._next_move = self._head + 2 * WINDOW
        self._turns = 0
        # The text that the next ones change, its number of messages, and the length of the window's
        # text up to the end of its first message.
        self._base, self._stop, self._edge = _Text("", "", []), 0, 0
        self._latest: dict[int, _Text] = {}  # by its number of messages

    def prompt(self, index: int) -> str:
        """Return the prompt of the turn `index`."""
        return self._beginning(index, [], is_prompt=True).text

    def turn(self, index: int, message: Message) -> tuple[str, Spans]:
        """Return the text that ends with `message` as the turn `index`, and its blocks."""
        beginning = self._beginning(index, [message], is_prompt=False)
        if message is self._messages[index]:
            self._latest = {index + 1: beginning}
        return beginning.text, beginning.blocks

    def advance(self, stop: int) -> None:
        """Take the text of the first `stop` messages, which end with the assistant's, as the new
        base."""
        if not self._gaps:
            return
        new = self._latest.pop(stop, None) or self._beginning(stop, [], is_prompt=False)
        if self._is_sampled(stop):
            prompt = self._render(self._messages[: stop - 1], True)[0]
            full_text, blocks = self._render(self._messages[:stop], False)
            same_blocks = new.blocks == blocks[len(blocks) - len(new.blocks) :]
            if (new.text, self.prompt(stop - 1)) != (full_text, prompt) or not same_blocks:
                raise WindowError
        self._base, self._stop = new, stop
        if stop >= self._next_move:
            self._move(WINDOW)
            self._next_move = stop + max(WINDOW, stop - self._start - WINDOW)

    def check(self, full_text: str) -> None:
        """Raise `WindowError` unless windows lead to the text of the whole conversation."""
        if self._is_windowed:
            text = self._beginning(len(self._messages), [], is_prompt=False).text
            if text != full_text:
                raise WindowError

    @property
    def _is_windowed(self) -> bool:
        return self._start != self._head

    def _is_sampled(self, stop: int) -> bool:
        """Tell whether a turn is compared: the first, second, fourth, ..., and new kinds."""
        if not self._is_windowed:
            return False
        self._turns += 1
        kind = tuple(message_kind(m, is_trained=True) for m in self._messages[stop - 2 : stop])
        is_new = kind not in self._compared and len(self._compared) < MAX_KINDS
        if is_new:
            self._compared.add(kind)
        return is_new or self._turns.bit_count() == 1

    def _window(self, stop: int, extra: list[Message], *, is_prompt: bool) -> tuple[str, Spans]:
        head = self._messages[: min(self._head, stop)]
        messages = [*head, *self._messages[self._start : stop], *extra]
        try:
            return self._render(messages, is_prompt)
        except RowError:
            if self._is_windowed:  # the template may refuse the gap
                raise WindowError from None
            raise

    def _beginning(self, stop: int, extra: list[Message], *, is_prompt: bool) -> _Text:
        """Return the text of `stop` messages and `extra`."""
        window, blocks = self._window(stop, extra, is_prompt=is_prompt)
        while self._is_windowed:
            shared = shared_length(self._base.window, window)
            if shared >= self._edge:
                base_length = len(self._base.text) - len(self._base.window) + shared
                text = self._base.text[:base_length] + window[shared:]
                shift = len(text) - len(window)
                behind = [(a + shift, b + shift) for a, b in blocks if a >= self._edge]
                return _Text(text, window, behind)
            self._move(2 * (self._stop - self._start))
            window, blocks = self._window(stop, extra, is_prompt=is_prompt)
        return _Text(window, window, blocks)

    def _move(self, length: int) -> None:
        """Begin the window at least `length` messages before the end of the base, so that both
        texts are equal behind the window's first message."""
        while True:
            starts = (gap for gap in reversed(self._gaps) if gap <= self._stop - length)
            self._start = next(starts, self._head)
            if not self._is_windowed:
                return
            window, _ = self._window(self._stop, [], is_prompt=False)
            first, _ = self._window(self._start + 1, [], is_prompt=False)
            self._edge = shared_length(first, window)
            tail = self._base.text[-len(window) :]
            if shared_length(tail[::-1], window[::-1]) >= len(window) - self._edge:
                self._base = self._base._replace(window=window)
                return
            length *= 2


def _gaps(messages: list[Message]) -> list[int]:
    """Return the end of the head, and the possible starts of windows behind it: the roles around
    the gap follow each other in the conversation too, and every message keeps its parity."""
    roles = [message["role"] for message in messages]
    starts = [[n for n in range(1, len(roles)) if (roles[n - 1], roles[n]) == gap] for gap in GAPS]
    candidates = max(starts, key=len)
    return [n for n in candidates if (n - candidates[0]) % 2 == 0]
