"""Keys by which publishers say whether a turn, or a row, is trained.

All that a turn has must say yes. What cannot be read for certain is refused, with the cure: weights
between 0 and 1, and `mask`, which for some means trained and for others hidden.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.reading.row import PREVIEW_CHARS, Values

# 1 and true: trained.
TRAINS = {"train", "training", "trainable", "trained", "is_trained", "loss", "loss_mask"}
WEIGHTS = {"weight", "loss_weight"}
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
        raise _error(f"unknown mask: {where} has {key} = {repr(value)[:PREVIEW_CHARS]}", key)


def flags_of(item: Values, flags: Iterable[str], others: Iterable[str]) -> list[tuple[str, Any]]:
    """Return the flags of an item and what they say, with those inside of objects.

    flags, others: its keys that are flags, and keys whose objects may hold some.
    """
    own = [pair for key in flags for pair in _values(key, item[key])]
    objects = [value for key in others if isinstance(value := item.get(key), dict | list)]
    return own + [pair for value in objects for pair in _inside(value)]


def _values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a flag with its value; of an object, such as `{"loss": false}`, those inside."""
    if isinstance(value, dict):
        yield from _inside(value)
    elif value is not None:
        yield key, value


def _inside(value: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if key in FLAGS:
            yield from _values(key, item)
        elif isinstance(item, dict | list):
            yield from _inside(item)


def all_trained(flags: Iterable[tuple[str, Any]], where: str) -> bool:
    """Return whether all flags say that it is trained. Raises `RowError`."""
    return all(says_trained(key, value, where) for key, value in flags)


def check_not_trained_by_role(flags: Iterable[tuple[str, Any]], where: str) -> None:
    """Raise `RowError` if a message that is no assistant's is marked to be trained."""
    for key, value in flags:
        if key not in WEIGHTS and says_trained(key, value, where):
            raise _error(
                f"not an assistant's: {where} is marked to be trained ({key}), and only assistant "
                "turns are",
                key,
            )


def says_trained(key: str, value: Any, where: str) -> bool:
    """Return what one flag says. Raises `RowError`."""
    has = f"{where} has {key} = {repr(value)[:PREVIEW_CHARS]}"
    if key in UNCLEAR:
        reason = f"unclear mask: {has}, which means trained for some and hidden for others"
        raise _error(f"{reason}; rename it to train, or to masked", key)
    if not isinstance(value, bool | int | float):
        raise _error(f"unknown mask: {has}, known are true and false", key)
    if value not in (0, 1):
        raise _error(f"unknown weight: {has}, known are 0 and 1", key)
    return bool(value) != (key in HIDES)


def _error(reason: str, key: str) -> RowError:
    return RowError(f"{reason}; or leave it out (data.leave_out: [{key}])")
