"""Keys by which publishers say whether, and with which weight, a turn or a row is trained.

All that a turn has must say yes, and its weights are multiplied. What cannot be read for certain is
refused, with the cure: weights inside of objects, which may be about anything, and `mask`, which
for some means trained and for others hidden."""

import math
import re
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.reading.row import PREVIEW_CHARS, Values

# 1 and true: trained.
TRAINS = {"train", "training", "trainable", "trained", "is_trained", "loss", "loss_mask"}
WEIGHTS = {"weight", "loss_weight"}
# Products of a row's and a turn's weight stay normal numbers in float32.
SMALLEST, LARGEST = 1e-15, 1e15
# 1 and true: not trained.
HIDES = {"masked", "is_masked", "no_loss", "ignore_loss"}
UNCLEAR = {"mask"}
FLAGS = TRAINS | WEIGHTS | HIDES | UNCLEAR
# Of an answer that was judged (KTO): true or false; classes, which are numbers or words, are none.
LABEL = "label"
MASKS = {"mask", "masks", "masked"}
SCALES = {"weight", "weights"}
WORDS = {
    *("train", "training", "trainable", "trained", "untrained", "loss", *MASKS, *SCALES),
    *("learn", "learnable", "learned", "supervised", "ignore", "ignored", "exclude", "excluded"),
}
# Columns may be about anything, so two words must say that one is about training.
SCALED = {"loss", "sample", "example", "turn", "turns", "message", "token", "train", "training"}
NO_LOSS_MASKS = {"attention_mask"}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


class Flag(NamedTuple):
    """A key that says what is trained, and its value; inside: in an object of anything."""

    key: str
    value: Any
    inside: bool = False


@lru_cache(maxsize=4096)
def is_like_flag(key: str, *, of_row: bool) -> bool:
    """Tell whether a column, or a key of a message, is named as if it said what is trained."""
    words = {word.lower() for word in WORD.findall(key)}
    if not of_row:
        return not WORDS.isdisjoint(words)
    scaled = words - SCALES
    is_scale = scaled != words and (not scaled or not SCALED.isdisjoint(scaled))
    return key not in NO_LOSS_MASKS and (is_scale or not MASKS.isdisjoint(words))


def check_unknown_flag(key: str, value: Any, where: str) -> None:
    """Raise `RowError` if a key that is like a flag has a value that could be one."""
    if not isinstance(value, str):
        cure = "; name it in data.columns.weight if it is one" if _is_number(value) else ""
        shown = repr(value)[:PREVIEW_CHARS]
        raise _error(f"unknown mask: {where} has {key} = {shown}{cure}", key)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def flags_of(item: Values, flags: Iterable[str], others: Iterable[str]) -> list[Flag]:
    """Return the flags of an item and what they say, with those inside of objects. flags, others:
    its keys that are flags, and keys whose objects may hold some."""
    own = [flag for key in flags for flag in _values(key, item[key])]
    objects = [value for key in others if isinstance(value := item.get(key), dict | list)]
    return own + [flag._replace(inside=True) for value in objects for flag in _inside(value)]


def _values(key: str, value: Any) -> Iterator[Flag]:
    """Yield a flag; of an object, such as `{"loss": false}`, those inside."""
    if isinstance(value, dict):
        yield from _inside(value)
    elif value is not None:
        yield Flag(key, value)


def _inside(value: dict[str, Any] | list[Any]) -> Iterator[Flag]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if key in FLAGS:
            yield from _values(key, item)
        elif isinstance(item, dict | list):
            yield from _inside(item)


def weight_of(flags: Iterable[Flag], where: str) -> float:
    """Return the weight of what has these flags, 0 if it is not trained. Raises `RowError`."""
    return math.prod(weight_said(flag, where) for flag in flags)


def check_not_trained_by_role(flags: Iterable[Flag], where: str) -> None:
    """Raise `RowError` if a message that is no assistant's is marked to be trained."""
    for flag in flags:
        key = flag.key
        if weight_said(flag, where) and key not in WEIGHTS:
            raise _error(
                f"not an assistant's: {where} is marked to be trained ({key}), and only assistant "
                "turns are",
                key,
            )


def weight_said(flag: Flag, where: str, *, weights: Collection[str] = WEIGHTS) -> float:
    """Return the weight of one flag, 0: not trained; weights: keys of more than 0 and 1."""
    key, value, inside = flag
    has = f"{where} has {key} = {repr(value)[:PREVIEW_CHARS]}"
    if key in UNCLEAR:
        reason = f"unclear mask: {has}, which means trained for some and hidden for others"
        raise _error(f"{reason}; rename it to train, or to masked", key)
    if key in weights and not inside:
        if not isinstance(value, bool | int | float) or not _is_weight(value):
            known = f"0 and numbers from {SMALLEST:g} to {LARGEST:g}"
            raise _error(f"unknown weight: {has}, known are {known}", key)
        return float(value)
    if not isinstance(value, bool | int | float):
        raise _error(f"unknown mask: {has}, known are true and false", key)
    if value not in (0, 1):
        move = "; move it into the turn itself" if key in weights else ""
        raise _error(f"unknown weight: {has}, known are 0 and 1{move}", key)
    return float(bool(value) != (key in HIDES))


def _is_weight(value: float) -> bool:
    return value == 0 or SMALLEST <= value <= LARGEST


def _error(reason: str, key: str) -> RowError:
    return RowError(f"{reason}; or leave it out (data.leave_out: [{key}])")
