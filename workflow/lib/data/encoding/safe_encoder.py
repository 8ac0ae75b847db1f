"""Text to token ids, where only the chat template can write a special token, never the data.

Special tokens in a user's text are *guarded* before rendering: each character becomes one of the
private-use plane. After rendering both spellings are swapped, and a second tokenizer, whose special
tokens are spelled guarded, reads the result. Lengths and positions do not change. Text without
special tokens, nearly all, takes the first tokenizer as it is.

A long text is encoded in pieces, as the library takes 200 bytes of memory for a character (0.23.3,
2.6 million characters, 2026-11-29). Their tokens are those of the whole text: a piece begins behind
a word of the one before, as pre-tokenizers read from left to right, and no model joins their words.
A tokenizer for which that is wrong is noticed: it knows no words, or two pieces differ in the
tokens behind a cut, which both have. Then the text is encoded as a whole."""

import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

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


SHORT_TAIL = 64  # of a prompt's cached end; nearly all rows have the same
MAX_TAILS = 1024
PRIVATE_USE = 0xF0000  # first code point of plane 15, which has no assigned characters


class SafeEncoder:
    """Encodes text by the tokenizer's own rules; adds no token, keeps data's text ordinary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._plain.no_truncation()
        self._plain.no_padding()
        added = self._plain.get_added_tokens_decoder()
        specials = {number: token.content for number, token in added.items() if token.special}
        self.special_ids = set(specials)
        self._ids = {text: number for number, text in specials.items()}
        # each character of any special token gets a private-use one of its own
        characters = sorted(set("".join(specials.values())))
        self._guard = {ord(char): PRIVATE_USE + n for n, char in enumerate(characters)}
        self._swap = self._guard | {new: old for old, new in self._guard.items()}
        self.special_pattern = _any_of(list(specials.values()))
        self._names = {text: text.translate(self._guard) for text in specials.values()}
        self._either = _any_of([*self._names, *self._names.values()])
        standalone = [
            token.content for token in added.values() if token.special and not token.rstrip
        ]
        self._anchor = next(iter([*standalone, *specials.values()]), "")
        self._tails: dict[tuple[str, bool], Ids] = {}

    @cached_property
    def _guarded(self) -> Tokenizer:
        """The second tokenizer, made at its first use: most chats spell no special token."""
        spec = json.loads(self._plain.to_str())
        guarded = Tokenizer.from_str(json.dumps(_rename_specials(spec, self._names)))
        for text, alias in self._names.items():
            is_same_id = guarded.token_to_id(alias) == self._plain.token_to_id(text)
            assert is_same_id, f"special token {text!r} changed its id when guarded"
        return guarded

    def specials_in(self, text: str) -> frozenset[str]:
        """Return the special tokens that a text spells."""
        if self.special_pattern.search(text) is None:
            return frozenset()
        return frozenset(self.special_pattern.findall(text))

    def spellings(self, ids: Collection[int]) -> frozenset[str]:
        """Return the spellings of the special tokens among `ids`."""
        return frozenset(text for text, number in self._ids.items() if number in ids)

    def guard(self, text: str, *, but: Collection[str] = ()) -> str:
        """Return `text` with the spellings of special tokens replaced, for the chat template. Those
        in `but` stay, and become special tokens if the template writes them."""
        return self.special_pattern.sub(
            lambda match: match[0] if match[0] in but else match[0].translate(self._guard), text
        )

    def end_of_last_special(self, text: str, start: int) -> int | None:
        """Return the character after the last special token from `start` on; None without one."""
        ends = [match.end() for match in self.special_pattern.finditer(text, start)]
        return ends[-1] if ends else None

    def without_repeated_end(self, text: str, stop: int) -> int:
        """Return the end of the first of equal special tokens before `stop`."""
        start = self.start_of_last_special(text[:stop])
        if start is None:
            return stop
        token = text[start:stop]
        while text.endswith(token, 0, start):
            start -= len(token)
        return start + len(token)

    def special_text(self, text: str, start: int) -> str:
        """Return the special token at `start` of a rendered text; empty without one."""
        match = self.special_pattern.match(text, start)
        return match[0] if match else ""

    def start_of_last_special(self, text: str) -> int | None:
        """Return the first character of the last special token; None without one."""
        starts = [match.start() for match in self.special_pattern.finditer(text)]
        return starts[-1] if starts else None

    def encode_rendered(self, text: str, *, guarded: bool) -> TextEncoding:
        """Encode a rendered text. guarded: its messages went through `guard`."""
        if not guarded:
            return encoding(self._plain, text)
        swapped = self._either.sub(lambda match: match.group().translate(self._swap), text)
        return encoding(self._guarded, swapped)

    def tokens(
        self, text: str, *, guarded: bool, before: "TextTokens | None" = None, turn: int = 0
    ) -> "TextTokens":
        """Return the tokens of a rendered text. Those of the beginning that it has in common with
        `before` are taken from there, up to a special token before the character `turn`, as special
        tokens stand alone."""
        shared = before.shared_specials(text, turn) if before is not None else []
        if before is not None and shared:
            start, _, first = shared.pop()
            tail = self.encode_rendered(text[start:], guarded=guarded)
            if tail.ids[0] == before.ids[first]:
                head = before.ids[:first]
                return TextTokens(text, tail, self.special_ids, start, head, shared)
        return TextTokens(text, self.encode_rendered(text, guarded=guarded), self.special_ids)

    def is_prompt(self, tokens: "TextTokens", end: int, *, guarded: bool) -> bool:
        """Tell whether the prompt, the text up to `end`, has the same tokens alone and in the whole
        text; compared after the last special token, as these stand alone."""
        ids, end = tokens.encoding.ids, end - tokens.start
        stop = tokens.encoding.first_from(end)
        first = next((i for i in range(stop - 1, -1, -1) if ids[i] in self.special_ids), 0)
        start = tokens.encoding.span(first)[0] if ids[first] in self.special_ids else 0
        text = tokens.text[tokens.start + start : tokens.start + end]
        return self._tail_ids(text, guarded=guarded) == ids[first:stop]

    def _tail_ids(self, text: str, *, guarded: bool) -> Ids:
        ids = self._tails.get((text, guarded))
        if ids is None:
            ids = self.encode_rendered(text, guarded=guarded).ids
            if len(text) <= SHORT_TAIL and len(self._tails) < MAX_TAILS:
                self._tails[text, guarded] = ids
        return ids

    def encode_answer(self, text: str, *, guarded: bool) -> Ids:
        """Encode rendered text after a prompt, without a blank; raises `ValueError` for one."""
        for anchor in (self._anchor, self._anchor + "\n"):
            ids, span = encoded = self.encode_rendered(anchor + text, guarded=guarded)
            first = encoded.first_from(len(anchor))
            before = span(first - 1)[1] if first else 0
            token = self._plain.id_to_token(ids[first]) if first < len(ids) else None
            begins = token is not None and token.startswith("\u2581")
            if before <= len(anchor) and (not begins or text.startswith(" ")):
                return ids[first:]
        raise ValueError("the tokenizer puts a blank before the answer")

    def encode_plain(self, text: str) -> TextEncoding:
        """Encode text of the data alone: no part of it becomes a special token."""
        return encoding(self._guarded, text)


Special = tuple[int, int, int]
"""A special token: its first character, its end, its number among the tokens."""


@dataclass
class TextTokens:
    """Tokens of a rendered text: `head` of its first `start` characters, and the encoding of the
    others. head_specials: special tokens of the head."""

    text: str
    encoding: TextEncoding
    special_ids: set[int]
    start: int = 0
    head: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    head_specials: list[Special] = field(default_factory=list)

    @cached_property
    def ids(self) -> npt.NDArray[np.uint32]:
        """All token ids uint32, (tokens,): head and tail."""
        tail = np.array(self.encoding.ids, dtype=np.uint32)
        return np.concatenate([self.head, tail]) if len(self.head) else tail

    def turn_span(self, start: int, end: int) -> tuple[int, int]:
        """Return the tokens [first, stop) of a turn, the characters [start, end) behind a prompt
        (`SafeEncoder.is_prompt`). A role's token may have taken blanks behind it; it is the
        prompt's."""
        first = self.encoding.first_from(start - self.start)
        stop = self.encoding.first_from(end - self.start, lo=first)
        return len(self.head) + first, len(self.head) + stop

    def strips_blanks(self, start: int, span: tuple[int, int]) -> bool:
        """Tell whether special tokens took blanks of the turn that begins at `start` and has the
        tokens `span`: the one before it, or the one at its end."""
        first, last = span[0] - len(self.head), span[1] - len(self.head) - 1
        ids, chars = self.encoding
        is_special = first > 0 and ids[first - 1] in self.special_ids
        takes_end = self.text[self.start + chars(last)[0]].isspace()
        return (is_special and chars(first - 1)[1] > start - self.start) or (
            ids[last] in self.special_ids and takes_end
        )

    def shared_specials(self, text: str, end: int) -> list[Special]:
        """Return the special tokens before `end` in the common beginning with another text."""
        shared = shared_length(self.text, text)
        specials = list(self.head_specials)
        for number, token in enumerate(self.encoding.ids):
            if token in self.special_ids:
                a, b = self.encoding.span(number)
                specials.append((self.start + a, self.start + b, len(self.head) + number))
        return [special for special in specials if special[0] < end and special[1] <= shared]


def shared_length(text: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _any_of(strings: list[str]) -> re.Pattern[str]:
    """Match any of the strings, the longest first as the tokenizer does; nothing without one."""
    ordered = sorted(filter(None, strings), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _rename_specials(spec: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return a tokenizer's JSON with other spellings of its special tokens, ids unchanged. Many
    tokenizers list a special token in the model's vocabulary too (a dict, or pairs for Unigram)."""
    model = dict(spec["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): index for text, index in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in spec["added_tokens"]
    ]
    return {**spec, "model": model, "added_tokens": added}
