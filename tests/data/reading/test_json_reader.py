"""JSON arrays: the same rows in pieces of any size, broken rows named, other files refused."""

import json

import pytest

from tests.support.data_files import read, write
from workflow.lib.data.reading import json_reader
from workflow.lib.data.reading.row import BrokenRow, Row
from workflow.lib.system.errors import UserError


@pytest.mark.parametrize("buffer", [1, 2, 3, 5, 16, 64])
def test_json_array_is_read_the_same_in_pieces_of_any_size(buffer, tmp_path, monkeypatch):
    monkeypatch.setattr(json_reader, "BUFFER_CHARS", buffer)
    values = [
        {"a": -1.5e-7, "b": [True, None, {"c": '\\"\u2028五🦊'}], "d": "x" * 99},
        {},
        {"long": list(range(50))},
    ]
    path = write(tmp_path / "a.json", " " + json.dumps([*values, 12345678901, "]", -0.5]) + " \n")
    rows = read(path)
    assert [row.value for row in rows if isinstance(row, Row)] == values
    assert [type(row) for row in rows] == [Row] * 3 + [BrokenRow] * 3
    assert [row.preview for row in rows[3:]] == ["12345678901", '"]"', "-0.5"]


def test_invalid_utf8_in_a_json_array_breaks_its_row_alone(tmp_path):
    path = write(tmp_path / "a.json", b'[{"a": "\xff"}, {"a": 2}]')
    first, second = read(path)
    assert isinstance(first, BrokenRow)
    assert first.reason == "invalid UTF-8"
    assert second == Row(2, {"a": 2})


def test_json_items_that_are_no_objects_are_broken_rows(tmp_path):
    path = write(tmp_path / "a.json", '[{"a": 1}, 2, "x]", {"a": 4}]')
    assert [type(row) for row in read(path)] == [Row, BrokenRow, BrokenRow, Row]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a":\n 1}', "no JSON array of objects; one object a line is a .jsonl file"),
        ("3", "no JSON array"),
        ('[{"a": 1}, {"a": ', "broken JSON in row 2"),
        ('[{"a": 1} {"a": 2}]', "after row 1: no comma"),
        ('[{"a": 1}', "after row 1: no comma"),
        ('[{"a": 1}, {"a": "x', "broken JSON in row 2"),
        ('[{"a": 1}, {"a" 2}, ' + " " * 100, "broken JSON in row 2"),
        ('[{"a": 1}] []', "more text follows the array of 1 rows"),
    ],
)
def test_json_that_cannot_be_read_on_stops(text, reason, tmp_path):
    with pytest.raises(UserError, match=reason):
        read(write(tmp_path / "a.json", text))
