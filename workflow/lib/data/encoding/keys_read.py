"""Every key of a row, and inside of it, is read, refused, or counted as not read.

Readers declare a `KeySchema`: of a row's columns, of a message, of a part of its content, of a
call, of a tool. The other keys are judged once for each set of keys that occurs: nearly all rows of
a source have one of few.

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
from workflow.lib.data.reading.row_chunks import PREVIEW_CHARS, Values, printable
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
    """A key that decides what is trained, with its value. inside: it stands inside of an object."""

    key: str
    value: Any
    inside: bool = False


@lru_cache(maxsize=4096)
def is_like_flag(key: str, *, is_column: bool) -> bool:
    """Tell whether a column, or a key of a message, has the name of a flag."""
    words = {word.lower() for word in WORD.findall(key)}
    if not is_column:
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


def flags_of(item: Values, flags: Iterable[str], object_keys: Iterable[str]) -> list[Flag]:
    """Return the flags of an item and their values, including flags inside of objects. flags: keys
    that are flags. object_keys: keys whose objects may hold some."""
    item_flags = [flag for key in flags for flag in _values(key, item[key])]
    objects = [value for key in object_keys if isinstance(value := item.get(key), dict | list)]
    return item_flags + [flag._replace(inside=True) for value in objects for flag in _inside(value)]


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
    """Raise `RowError` at a flag that would train a turn of another role than the assistant's."""
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
            allowed = f"0 and numbers from {SMALLEST:g} to {LARGEST:g}"
            raise _error(f"unknown weight: {has}, known are {allowed}", key)
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
COLUMN_ONLY = {
    **dict.fromkeys(("tools", "functions"), "list of tools"),
    **dict.fromkeys(("system", "system_prompt", "system_message"), "system text"),
}
MAX_USAGES = 4096
MAX_NAMES = 100  # of keys that are not read; the others are counted together
MAX_NAME_CHARS = 64
OTHERS = ("", "other keys")
MEDIA = {
    *("image", "images", "image_url", "image_urls", "image_path", "input_image", "pixel_values"),
    *("audio", "audios", "audio_url", "audio_path", "input_audio"),
    *("video", "videos", "video_url", "video_path"),
}


@dataclass(frozen=True)
class KeySchema:
    """The keys that a kind of object may have. name: in listings, "" for a row's columns. read:
    keys that a reader uses. passed: all other keys go to the chat template. flags: keys that decide
    what is trained. aliases: other names of keys."""

    name: str
    read: frozenset[str]
    passed: bool = False
    flags: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict, hash=False)


class KeyUsage(NamedTuple):
    """What becomes of a set of keys: not read, flags, passed to the template. aliased: keys by the
    name that they stand for."""

    unread: tuple[str, ...]
    flags: tuple[str, ...]
    passed: tuple[str, ...]
    aliased: Mapping[str, tuple[str, ...]]


@dataclass
class KeyAudit:
    """Checks the keys of a source, and counts those that nothing reads. template_keys: keys of
    messages that the template reads. leave_out: `data.leave_out`. omit_media: leave out pictures
    and sounds too. group_by: a column that is read. all_trained: no turn may have a weight."""

    template_keys: Collection[str] = ()
    leave_out: Collection[str] = ()
    omit_media: bool = False
    group_by: str | None = None
    all_trained: bool = False
    _usages: dict[tuple[str, ...], KeyUsage] = field(default_factory=dict)
    _counts: dict[tuple[str, str], int] = field(default_factory=dict)
    _columns: dict[str, None] = field(default_factory=dict)

    def check(self, schema: KeySchema, item: Values, where: str) -> tuple[Values, KeyUsage]:
        """Return an item without the keys of `leave_out`, and the use of its keys. Raises
        `RowError` at a key that is not read but changes what should be trained."""
        usage = self._usages.get((schema.name, *item)) or self._usage(schema, item)
        for key in usage.unread:
            value = item[key]
            if value not in EMPTY:
                self._check_unread(schema, key, value, where)
                self.count(schema, key)
        if schema.passed and usage.unread:
            self._check_no_text({key: item[key] for key in usage.unread}, where)
        if self.leave_out:
            item = {key: value for key, value in item.items() if key not in self.leave_out}
        return item, usage

    def _usage(self, schema: KeySchema, item: Values) -> KeyUsage:
        used_keys = [key for key in item if key not in self.leave_out]
        names = {key: self._alias(schema, key) for key in used_keys} if schema.aliases else {}
        aliased: dict[str, tuple[str, ...]] = {}
        for key, name in names.items():
            if name is not None:
                aliased[name] = (*aliased.get(name, ()), key)
        flags = [key for key in used_keys if key in schema.flags and key not in schema.read]
        passed = [key for key in used_keys if key not in schema.read and key not in flags]
        passed = [key for key in passed if names.get(key) is None]
        template_keys = self.template_keys if schema.passed else ()
        unread = [key for key in item if key in self.leave_out]
        unread += [key for key in passed if key not in template_keys]
        if not schema.name:
            unread = [key for key in unread if key != self.group_by]
        usage = KeyUsage(tuple(unread), tuple(flags), tuple(passed), aliased)
        if not schema.name:
            self._columns |= dict.fromkeys(key for key in used_keys if key not in unread)
        if len(self._usages) < MAX_USAGES:
            self._usages[schema.name, *item] = usage
        return usage

    def _alias(self, schema: KeySchema, key: str) -> str | None:
        """Return the canonical name of a key, unless the template reads the key itself."""
        if key in self.template_keys and key not in CANONICAL:
            return None
        return schema.aliases.get("_".join(WORD.findall(key)).lower())

    def reasoning_key(self, key: str) -> str:
        """Return the key under which the template reads a reasoning that a message has as `key`."""
        if key in self.template_keys:
            return key
        read_names = [name for name in REASONING_KEYS if name in self.template_keys]
        fallback = key if key in REASONING_KEYS else REASONING_KEYS[0]
        return read_names[0] if read_names else fallback

    def _check_unread(self, schema: KeySchema, key: str, value: Any, where: str) -> None:
        if key in self.leave_out:
            return
        if (key in MEDIA and isinstance(value, str | bytes | list | dict)) or _holds_media(value):
            if self.omit_media:
                return
            raise media_error(f"{where} has {key}")
        if is_like_flag(key, is_column=not schema.name):
            check_unknown_flag(key, value, where)
        elif schema.passed and (content := COLUMN_ONLY.get(key)):
            raise RowError(
                f"{content} in a message: {where} has {key}; give the row a column of it, or leave "
                f"it out (data.leave_out: [{key}])"
            )

    def _check_no_text(self, unread: Values, where: str) -> None:
        """Raise `RowError` at texts of a message that nothing reads, with all of their keys."""
        exempt = {*self.leave_out, *NAMES, *MEDIA}
        texts = {k: v for k, v in unread.items() if k not in exempt and holds_text(v)}
        for key, value in texts.items():
            if not _holds_media(value):
                raise _error(
                    f"text that nothing reads: {where} has {key} = {repr(value)[:PREVIEW_CHARS]}, "
                    "and the chat template does not read it; rename it to content, "
                    "reasoning_content or tool_calls if it is one",
                    ", ".join(texts),
                )

    def count(self, schema: KeySchema, key: str) -> None:
        """Count a key that was not read; beyond `MAX_NAMES` names they are counted together."""
        counted = schema.name, key
        if counted not in self._counts and len(self._counts) >= MAX_NAMES:
            counted = OTHERS
        self._counts[counted] = self._counts.get(counted, 0) + 1

    def report(self) -> tuple[list[str], dict[str, int]]:
        """Return the columns that were read, and unread keys with counts, since the last call."""
        counted, self._counts = self._counts, {}
        counts = {
            printable(key[:MAX_NAME_CHARS]) + (f" ({schema})" if schema else ""): count
            for (schema, key), count in counted.items()
        }
        return [c for c in self._columns if ("", c) not in counted], counts


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
    verdict = TRUE_AND_FALSE.get(str(label).strip().lower()) if name in value else None
    if verdict is None:
        has = f"is {label!r}" if name in value else "is missing"
        raise RowError(f"no judgement: column {name!r} {has}, known are true and false (or 1, 0)")
    return verdict


def check_label(usage: KeyUsage, value: Values, *, label: str | None) -> None:
    """Leave out a row of a bad answer, by the column `label` that the user named. Raises
    `UserError` at a label of false that nobody named: it may be a judgement, or the task's."""
    if label is not None:
        if not judgement(value, label):
            raise UnwantedRowError(f"not trained: column {label!r} says that the answer is bad")
        return
    for name in LABELS if usage.unread else ():
        if name in usage.unread and flag_value(value.get(name)) is False:
            raise setting_error(
                "data.columns.label",
                None,
                f"a row has {name} = {value[name]!r}, which may say that its answer is bad, or be "
                "a part of the task",
                "Name the column to leave out rows of bad answers (data.columns: {label: "
                f"{name}}}), or ignore it (data.leave_out: [{name}])",
            )


def row_weight(usage: KeyUsage, value: Values, *, column: str) -> float:
    """Return the weight of a row in the loss, above 0. column: a column of weights beside those of
    `WEIGHTS`. In unread objects only true and false are flags. Raises `RowError` for a row that is
    not trained, and for an unreadable flag."""
    flags = flags_of(value, usage.flags, ())
    flags += [f for f in flags_of(value, (), usage.unread) if isinstance(f.value, bool)]
    product = 1.0
    for flag in flags:
        product *= flag_weight(flag, "the row", weights={*WEIGHTS, column})
        if not product:
            is_named = flag.key == column and column not in WEIGHTS
            error = UnwantedRowError if is_named else RowError
            raise error(f"not trained: column {flag.key!r} is {flag.value!r}")
    return product


def media_error(what: str) -> RowError:
    """Return the error of a row with pictures, sounds or videos."""
    return RowError(
        f"not text: {what}, and pictures, sounds and videos are not read; to train on the text "
        "alone, set data.media: omit"
    )


def _holds_media(value: Any) -> bool:
    """Tell whether a value is of bytes, or an image or a sound as `datasets` stores them."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, bytes) or (isinstance(value, dict) and "bytes" in value)
