"""Rows of a Parquet or Arrow file: the values that `datasets` gives for the same file.

Arrow's own values are these, but for two types. A column of type JSON, alone or inside of lists and
structs, holds JSON text, which is decoded here; and a map becomes an object, where `datasets` reads
no maps at all. A test compares every type with `datasets`. Its own reader is not used: it knows no
numbers of broken rows, and the process that reads would decode for all others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow

from workflow.lib.data.reading.chunks import NOT_UTF8, parse_json
from workflow.lib.data.reading.row import MAX_ROW_BYTES, BrokenRow, Row, as_row, too_large

# What Arrow or JSON raise at a value that is none of its type.
BROKEN_VALUES = (ValueError, KeyError, RecursionError)


@dataclass(frozen=True)
class TableRows:
    """Rows of a table from row `first` on, as an Arrow stream. A pickled batch would drag its whole
    file along."""

    first: int
    stream: bytes
    blank_lines: int = 0

    def rows(self) -> list[Row | BrokenRow]:
        table = pyarrow.ipc.open_stream(self.stream).read_all()
        if len(self.stream) > MAX_ROW_BYTES:
            return [self._large_row(table, index) for index in range(table.num_rows)]
        try:
            values = _values(table)
        except BROKEN_VALUES:
            return [self._row(table, index) for index in range(table.num_rows)]
        has_json = any(_decoder(column.type) is not None for column in table.schema)
        make = as_row if has_json else Row  # only JSON can nest deeply
        return [make(number, value) for number, value in enumerate(values, start=self.first)]

    def _large_row(self, table: pyarrow.Table, index: int) -> Row | BrokenRow:
        if table.slice(index, 1).nbytes > MAX_ROW_BYTES:
            return too_large(self.first + index, "")
        return self._row(table, index)

    def _row(self, table: pyarrow.Table, index: int) -> Row | BrokenRow:
        number = self.first + index
        try:
            (value,) = _values(table.slice(index, 1))
        except UnicodeDecodeError:
            return BrokenRow(number, NOT_UTF8, "")
        except BROKEN_VALUES as error:
            return BrokenRow(number, f"broken value: {error}", "")
        return as_row(number, value)


def table_rows(first: int, batch: pyarrow.RecordBatch) -> TableRows:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return TableRows(first, sink.getvalue().to_pybytes())


def _values(table: pyarrow.Table) -> list[dict[str, Any]]:
    """Return each row's values by column. Raises one of `BROKEN_VALUES`."""
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    for column in table.schema:
        decode = _decoder(column.type)
        if decode is not None:
            for row in rows:
                row[column.name] = decode(row[column.name])
    return rows


Decode = Callable[[Any], Any]


def _decoder(kind: pyarrow.DataType) -> Decode | None:
    """Return what decodes the JSON texts in a value of this type; None if it can hold none."""
    if isinstance(kind, pyarrow.JsonType):
        return _unless_null(parse_json)
    if isinstance(kind, pyarrow.StructType):
        return _unless_null(_struct_decoder(kind))
    if hasattr(kind, "item_type"):
        return _unless_null(_map_decoder(kind))
    if hasattr(kind, "value_type"):  # lists of all kinds, and dictionaries
        return _unless_null(_list_decoder(kind))
    return None


def _unless_null(decode: Decode | None) -> Decode | None:
    return decode and (lambda value: None if value is None else decode(value))


def _struct_decoder(kind: pyarrow.StructType) -> Decode | None:
    found = {field.name: decode for field in kind if (decode := _decoder(field.type))}
    if not found:
        return None
    same: Decode = _same
    return lambda value: {k: found.get(k, same)(item) for k, item in value.items()}


def _map_decoder(kind: Any) -> Decode | None:
    decode = _decoder(kind.item_type)
    return decode and (lambda value: {key: decode(item) for key, item in value.items()})


def _list_decoder(kind: Any) -> Decode | None:
    decode = _decoder(kind.value_type)
    return decode and (lambda value: [decode(item) for item in value])


def _same(value: Any) -> Any:
    return value
