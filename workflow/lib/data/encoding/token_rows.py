"""Rows of ready token ids, with labels or a loss mask. Raises `RowError`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from workflow.lib.data.encoding.row_values import RowError, kind
from workflow.lib.data.reading.row_chunks import Values
from workflow.lib.settings.data import DataColumns

IGNORED_LABEL = -100  # of a token that is not trained, as in Transformers


@dataclass(frozen=True)
class TokenRow:
    """Ready token ids, and whether each is trained; None: the row does not say."""

    ids: list[int]
    trained: list[bool] | None


def read_tokens(value: Values, columns: DataColumns) -> TokenRow:
    """Return token ids and loss mask, without the padding that `attention_mask` marks."""
    ids = _integers(value, columns.input_ids)
    trained = _targets(value, ids, columns)
    is_masked = value.get("attention_mask") is not None
    real = _flags(value, "attention_mask", ids) if is_masked else [True] * len(ids)
    if value.get("position_ids") is not None:
        _check_is_one_document(_integers(value, "position_ids"), real)
    trained = trained and [t for t, r in zip(trained, real, strict=True) if r]
    ids = [i for i, r in zip(ids, real, strict=True) if r]
    if not ids:
        raise RowError(f"empty: column {columns.input_ids!r}")
    return TokenRow(ids, trained)


def _check_is_one_document(positions: list[int], real: list[bool]) -> None:
    """Raise `RowError` at documents packed into one row: attention would cross them."""
    _same_length(positions, real, "position_ids")
    real_indices = [n for n, is_real in enumerate(real) if is_real]
    for previous, index in pairwise(real_indices):
        if positions[index] != positions[previous] + 1:
            raise RowError(
                f"packed documents: position_ids begin anew at place {index}; write a row for each "
                "document, or leave them out (data.leave_out: [position_ids])"
            )


def _targets(value: Values, ids: list[int], columns: DataColumns) -> list[bool] | None:
    if value.get(columns.labels) is not None:
        labels = _same_length(_integers(value, columns.labels), ids, columns.labels)
        for position, (label, token) in enumerate(zip(labels, ids, strict=True)):
            if label not in (IGNORED_LABEL, token):
                raise RowError(
                    f"labels differ from tokens: place {position} has label {label}, token "
                    f"{token}; a label is its own token (not the next one), or {IGNORED_LABEL}"
                )
        return [label != IGNORED_LABEL for label in labels]
    if value.get(columns.loss_mask) is not None:
        return _flags(value, columns.loss_mask, ids)
    return None


def _integers(value: Values, name: str) -> list[int]:
    numbers = value.get(name)
    if name not in value:
        raise RowError(f"missing column: {name!r}")
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise RowError(f"not a list of whole numbers: column {name!r}")
    return numbers


def _flags(value: Values, name: str, ids: list[int]) -> list[bool]:
    flags = value[name]
    if not isinstance(flags, list) or not all(flag in (0, 1) for flag in flags):
        raise RowError(f"not a list of 0 and 1: column {name!r} is {kind(flags)}")
    return [bool(flag) for flag in _same_length(flags, ids, name)]


def _same_length(numbers: list[int], ids: Sequence[int], name: str) -> list[int]:
    if len(numbers) != len(ids):
        raise RowError(f"unequal lengths: {len(ids)} token ids, {len(numbers)} in column {name!r}")
    return numbers
