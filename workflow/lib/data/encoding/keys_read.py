"""Every key of a row, and inside of it, is read, refused, or counted as not read.

Readers declare their keys of a place: the columns of a row, the keys of a message, of a part of its
content, of a call, of a tool. The other keys are judged once for each set of keys that occurs:
nearly all rows of a source have one of few.

Some keys are flags: they say whether, and with which weight, a turn or a row is trained. All flags
of a turn must say yes, and its weights are multiplied. Ambiguous flags are refused: weights inside
of objects, and `mask`, which for some means trained and for others hidden."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from workflow.lib.data.encoding.row_values import EMPTY, RowError, UnwantedRowError
from workflow.lib.data.reading.chunks import PREVIEW_CHARS, Values, printable
from workflow.lib.system.errors import setting_error

# 1 and true: trained.
TRAINS = {"train", "training", "trainable", "trained", "is_trained", "loss", "loss_mask"}
WEIGHTS = {"weight", "loss_weight"}
# Products of a row's and a turn's weight stay normal numbers in float32.
SMALLEST, LARGEST = 1e-15, 1e15
# 1 and true: not trained.
HIDES = {"masked", "is_masked", "no_loss", "ignore_loss"}
UNCLEAR = {"mask"}
FLAGS = TRAINS | WEIGHTS | HIDES | UNCLEAR
# Usual columns of a rated answer (KTO).
LABEL = "label"
LABELS = (LABEL, "desirable", "is_desirable")
TRUE_AND_FALSE = {
    **dict.fromkeys(("true", "1", "1.0"), True),
    **dict.fromkeys(("false", "0", "0.0"), False),
}
MASKS = {"mask", "masks", "masked"}
SCALES = {"weight", "weights"}
WORDS = {
    *("train", "training", "trainable", "trained", "untrained", "loss", *MASKS, *SCALES),
    *("learn", "learnable", "learned", "supervised", "ignore", "ignored", "exclude", "excluded"),
}
# Columns may be about anything, so only two such words make one about training.
SCALED = {"loss", "sample", "example", "turn", "turns", "message", "token", "train", "training"}
NO_LOSS_MASKS = {"attention_mask"}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


class Flag(NamedTuple):
    """A key that says what is trained, and its value; inside: within an object of any content."""

    key: str
    value: Any
    inside: bool = False


@lru_cache(maxsize=4096)
def is_like_flag(key: str, *, of_row: bool) -> bool:
    """Tell whether a column, or a key of a message, has the name of a flag."""
    words = {word.lower() for word in WORD.findall(key)}
    if not of_row:
        return not WORDS.isdisjoint(words)
    scaled = words - SCALES
    is_scale = scaled != words and (not scaled or not SCALED.isdisjoint(scaled))
    return key not in NO_LOSS_MASKS and (is_scale or not MASKS.isdisjoint(words))


def check_unknown_flag(key: str, value: Any, where: str) -> None:
    """Raise `RowError` if a key that is like a flag has a value that could be one."""
    value = flag_value(value)
    if not isinstance(value, str):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        cure = "; name it in data.columns.weight if it is one" if is_number else ""
        shown = repr(value)[:PREVIEW_CHARS]
        raise _error(f"unknown mask: {where} has {key} = {shown}{cure}", key)


def flag_value(value: Any) -> Any:
    """Return the value of the text true, false or of a number: a CSV file holds only text."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    try:
        return float(word)
    except ValueError:
        return value


def flags_of(item: Values, flags: Iterable[str], others: Iterable[str]) -> list[Flag]:
    """Return the flags of an item and their values, including flags inside of objects. flags,
    others: its keys that are flags, and keys whose objects may hold some."""
    own = [flag for key in flags for flag in _values(key, item[key])]
    objects = [value for key in others if isinstance(value := item.get(key), dict | list)]
    return own + [flag._replace(inside=True) for value in objects for flag in _inside(value)]


def _values(key: str, value: Any) -> Iterator[Flag]:
    """Yield a flag; of an object, such as `{"loss": false}`, those inside."""
    if isinstance(value, dict):
        yield from _inside(value)
    elif value not in (None, ""):
        yield Flag(key, flag_value(value))


def _inside(value: dict[str, Any] | list[Any]) -> Iterator[Flag]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if key in FLAGS:
            yield from _values(key, item)
        elif isinstance(item, dict | list):
            yield from _inside(item)


def weight_of(flags: Iterable[Flag], where: str, *, all_trained: bool) -> float:
    """Return the weight of an item with these flags, 0 if it is not trained. Raises `RowError`, if
    all tokens are trained (`data.loss_on`) also at a weight other than 1."""
    weights = [(flag, flag_weight(flag, where)) for flag in flags]
    for (key, value, _), weight in weights:
        if all_trained and weight != 1:
            reason = f"weights of turns: {where} has {key} = {value!r}, but data.loss_on = all"
            raise _error(f"{reason} trains every token alike; set it to completions", key)
    return math.prod(weight for _, weight in weights)


def check_not_trained_by_role(flags: Iterable[Flag], where: str) -> None:
    for flag in flags:
        key = flag.key
        if flag_weight(flag, where) and key not in WEIGHTS:
            raise _error(
                f"not an assistant's: {where} is marked to be trained ({key}), and only assistant "
                "turns are",
                key,
            )


def flag_weight(flag: Flag, where: str, *, weights: Collection[str] = WEIGHTS) -> float:
    """Return the weight of one flag, 0: not trained; weights: keys of more than 0 and 1."""
    key, value, inside = flag
    has = f"{where} has {key} = {repr(value)[:PREVIEW_CHARS]}"
    if key in UNCLEAR:
        reason = f"unclear mask: {has}, which means trained for some and hidden for others"
        raise _error(f"{reason}; rename it to train, or to masked", key)
    if key in weights and not inside:
        is_number = isinstance(value, bool | int | float)
        if not is_number or not (value == 0 or SMALLEST <= value <= LARGEST):
            known = f"0 and numbers from {SMALLEST:g} to {LARGEST:g}"
            raise _error(f"unknown weight: {has}, known are {known}", key)
        return float(value)
    if not isinstance(value, bool | int | float):
        raise _error(f"unknown mask: {has}, known are true and false", key)
    if value not in (0, 1):
        move = "; move it into the turn itself" if key in weights else ""
        raise _error(f"unknown weight: {has}, known are 0 and 1{move}", key)
    return float(bool(value) != (key in HIDES))


def _error(reason: str, key: str) -> RowError:
    return RowError(f"{reason}; or leave it out (data.leave_out: [{key}])")


# Of a message; every row is checked for whether the template writes it.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# What a message holds beside its content, by all of its names in small letters with underscores.
CALLS, REASONING = "tool_calls", "reasoning"
MESSAGE_ALIASES = {
    **dict.fromkeys((CALLS, "tool_call", "function_call", "function_calls", "tool_uses"), CALLS),
    **dict.fromkeys((*REASONING_KEYS, "reasoning_details", "reasoning_text"), REASONING),
    **dict.fromkeys(("thought", "thoughts", "thinking_content", "thinking_blocks"), REASONING),
    **dict.fromkeys(("chain_of_thought", "cot"), REASONING),
}
REASONING_COLUMNS = tuple(key for key, name in MESSAGE_ALIASES.items() if name == REASONING)
# Keys that every template gets in its own spelling, whatever it reads.
CANONICAL = (CALLS, "function_call", *REASONING_KEYS)
NAMES = ("id", "name")  # of a message or its speaker; whatever their text, they are no content
# A text that nobody has written: an id, a name, a time, an address.
LABEL_TEXT = re.compile(r"[\w.:/@+=#%&?~,-]*|[\d\s:.,/+TZ-]*", re.ASCII)
# Keys of a row that would be lost in a message.
PLACED_OTHERWISE = {
    **dict.fromkeys(("tools", "functions"), "list of tools"),
    **dict.fromkeys(("system", "system_prompt", "system_message"), "system text"),
}
MAX_SHAPES = 4096
MAX_NAMES = 100  # of keys that are not read; the others are counted together
MAX_NAME_CHARS = 64
OTHERS = ("", "other keys")
MEDIA = {
    *("image", "images", "image_url", "image_urls", "image_path", "input_image", "pixel_values"),
    *("audio", "audios", "audio_url", "audio_path", "input_audio"),
    *("video", "videos", "video_url", "video_path"),
}


@dataclass(frozen=True)
class Place:
    """Where keys stand, and which are read there. name: in listings, "" for columns; optional: keys
    of few items; passed: others go to the chat template; flags: those of training."""

    name: str
    read: frozenset[str]
    optional: frozenset[str] = frozenset()
    passed: bool = False
    flags: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict, hash=False)


class Shape(NamedTuple):
    """The use of a set of keys: which are not read, which are flags, which are passed on.
    has_optional: whether an optional one is among them; aliased: keys by what they are a name
    of."""

    unread: tuple[str, ...]
    flags: tuple[str, ...]
    passed: tuple[str, ...]
    has_optional: bool
    aliased: Mapping[str, tuple[str, ...]]


@dataclass
class KeyAccount:
    """Counts the keys of a source that are not read. template_keys: of a message, read by the
    template; leave_out: by the user's setting; omit_media: also pictures and sounds; group_by: is
    read; all_trained: no turn may have a weight."""

    template_keys: Collection[str] = ()
    leave_out: Collection[str] = ()
    omit_media: bool = False
    group_by: str | None = None
    all_trained: bool = False
    _shapes: dict[tuple[str, ...], Shape] = field(default_factory=dict)
    _counts: dict[tuple[str, str], int] = field(default_factory=dict)
    _columns: dict[str, None] = field(default_factory=dict)

    def take(self, place: Place, item: Values, where: str) -> tuple[Values, Shape]:
        """Account for the keys of an item; return it without keys to be left out, and its shape.
        Raises `RowError` at a key that is not read but changes what should be trained."""
        shape = self._shapes.get((place.name, *item)) or self._learn(place, item)
        for key in shape.unread:
            value = item[key]
            if value not in EMPTY:
                self._check(place, key, value, where)
                self.count(place, key)
        if place.passed and shape.unread:
            self._check_no_text({key: item[key] for key in shape.unread}, where)
        if self.leave_out:
            item = {key: value for key, value in item.items() if key not in self.leave_out}
        return item, shape

    def _learn(self, place: Place, item: Values) -> Shape:
        kept = [key for key in item if key not in self.leave_out]
        names = {key: self._alias(place, key) for key in kept} if place.aliases else {}
        aliased: dict[str, tuple[str, ...]] = {}
        for key, name in names.items():
            if name is not None:
                aliased[name] = (*aliased.get(name, ()), key)
        flags = [key for key in kept if key in place.flags and key not in place.read]
        others = [key for key in kept if key not in place.read and key not in flags]
        others = [key for key in others if names.get(key) is None]
        template_keys = self.template_keys if place.passed else ()
        unread = [key for key in item if key in self.leave_out]
        unread += [key for key in others if key not in template_keys]
        if not place.name:
            unread = [key for key in unread if key != self.group_by]
        has_optional = not place.optional.isdisjoint(kept)
        shape = Shape(tuple(unread), tuple(flags), tuple(others), has_optional, aliased)
        if not place.name:
            self._columns |= dict.fromkeys(key for key in kept if key not in unread)
        if len(self._shapes) < MAX_SHAPES:
            self._shapes[place.name, *item] = shape
        return shape

    def _alias(self, place: Place, key: str) -> str | None:
        """Return what a key is a name of, unless the template reads it by this name."""
        if key in self.template_keys and key not in CANONICAL:
            return None
        return place.aliases.get("_".join(WORD.findall(key)).lower())

    def reasoning_key(self, key: str) -> str:
        """Return the key under which the template reads a reasoning that a message has as `key`."""
        if key in self.template_keys:
            return key
        read = [name for name in REASONING_KEYS if name in self.template_keys]
        own = key if key in REASONING_KEYS else REASONING_KEYS[0]
        return read[0] if read else own

    def _check(self, place: Place, key: str, value: Any, where: str) -> None:
        if key in self.leave_out:
            return
        if (key in MEDIA and isinstance(value, str | bytes | list | dict)) or _holds_media(value):
            if self.omit_media:
                return
            raise media_error(f"{where} has {key}")
        if is_like_flag(key, of_row=not place.name):
            check_unknown_flag(key, value, where)
        elif place.passed and (what := PLACED_OTHERWISE.get(key)):
            raise RowError(
                f"{what} in a message: {where} has {key}; give the row a column of it, or leave it "
                f"out (data.leave_out: [{key}])"
            )

    def _check_no_text(self, unread: Values, where: str) -> None:
        """Raise `RowError` at texts of a message that nothing reads, with all of their keys."""
        apart = {*self.leave_out, *NAMES, *MEDIA}
        texts = {k: v for k, v in unread.items() if k not in apart and holds_text(v)}
        for key, value in texts.items():
            if not _holds_media(value):
                raise _error(
                    f"text that nothing reads: {where} has {key} = {repr(value)[:PREVIEW_CHARS]}, "
                    "and the chat template does not read it; rename it to content, "
                    "reasoning_content or tool_calls if it is one",
                    ", ".join(texts),
                )

    def count(self, place: Place, key: str) -> None:
        counted = place.name, key
        if counted not in self._counts and len(self._counts) >= MAX_NAMES:
            counted = OTHERS
        self._counts[counted] = self._counts.get(counted, 0) + 1

    def report(self) -> tuple[list[str], dict[str, int]]:
        """Return the columns that were read, and unread keys with counts, since the last call."""
        counted, self._counts = self._counts, {}
        counts = {_label(*place_and_key): count for place_and_key, count in counted.items()}
        return [c for c in self._columns if ("", c) not in counted], counts


def _label(place: str, key: str) -> str:
    return printable(key[:MAX_NAME_CHARS]) + (f" ({place})" if place else "")


def holds_text(value: Any) -> bool:
    """Tell whether somebody may have written a value: a text that is no label, or a list or an
    object with a text in it."""
    if isinstance(value, str):
        return LABEL_TEXT.fullmatch(value.strip()) is None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(item, str) or holds_text(item) for item in items)


def judgement(value: Values, name: str) -> bool:
    """Return whether the answer of a row is good, by the column `name`."""
    label = value.get(name)
    known = TRUE_AND_FALSE.get(str(label).strip().lower()) if name in value else None
    if known is None:
        has = f"is {label!r}" if name in value else "is missing"
        raise RowError(f"no judgement: column {name!r} {has}, known are true and false (or 1, 0)")
    return known


def check_label(shape: Shape, value: Values, *, label: str | None) -> None:
    """Leave out a row of a bad answer, by the column `label` that the user named. Raises
    `UserError` at a label of false that nobody named: it may be a judgement, or the task's."""
    if label is not None:
        if not judgement(value, label):
            raise UnwantedRowError(f"not trained: column {label!r} says that the answer is bad")
        return
    for name in LABELS if shape.unread else ():
        if name in shape.unread and flag_value(value.get(name)) is False:
            raise setting_error(
                "data.columns.label",
                None,
                f"a row has {name} = {value[name]!r}, which may say that its answer is bad, or be "
                "a part of the task",
                "Name the column to leave out rows of bad answers (data.columns: {label: "
                f"{name}}}), or ignore it (data.leave_out: [{name}])",
            )


def row_weight(shape: Shape, value: Values, *, column: str) -> float:
    """Return the weight of a row, not 0; `column`: beside known names. In objects about anything
    only true and false count. Raises `RowError` if it is not trained, or unreadable."""
    flags = flags_of(value, shape.flags, ())
    flags += [f for f in flags_of(value, (), shape.unread) if isinstance(f.value, bool)]
    product = 1.0
    for flag in flags:
        product *= flag_weight(flag, "the row", weights={*WEIGHTS, column})
        if not product:
            is_named = flag.key == column and column not in WEIGHTS
            error = UnwantedRowError if is_named else RowError
            raise error(f"not trained: column {flag.key!r} is {flag.value!r}")
    return product


def media_error(what: str) -> RowError:
    return RowError(
        f"not text: {what}, and pictures, sounds and videos are not read; to train on the text "
        "alone, set data.media: omit"
    )


def _holds_media(value: Any) -> bool:
    """Tell whether a value is of bytes, or an image or a sound as `datasets` stores them."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, bytes) or (isinstance(value, dict) and "bytes" in value)
