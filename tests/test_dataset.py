"""Reading data files: every row is yielded with its number, whole or broken; other files are refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from workflow.lib.data_config import FileType
from workflow.lib.dataset import column_names, read_rows
from workflow.lib.errors import UserError
from workflow.lib.file_types import file_type_of
from workflow.lib.rows import BrokenRow, Row
from workflow.lib.sources import SourceFile

ROWS = [{"text": 'one, "two"'}, {"text": "drei\nvier — 五"}, {"text": ""}]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, file_type: FileType | None = None) -> list[Row | BrokenRow]:
    return list(read_rows(path, setting="data.train", file_type=file_type))


def columns(*paths: Path) -> list[str]:
    files = [SourceFile(path, path.name, file_type_of(path, setting="")) for path in paths]
    return column_names(files, setting="data.train")


def jsonl(path: Path) -> Path:
    return write(path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))


def json_array(path: Path) -> Path:
    return write(path / "a.json", json.dumps(ROWS, indent=2))


def csv_file(path: Path) -> Path:
    return write(path / "a.csv", 'text\n"one, ""two"""\n"drei\nvier — 五"\n""\n')


def parquet(path: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path / "a.parquet")
    return path / "a.parquet"


@pytest.mark.parametrize("make", [jsonl, json_array, csv_file, parquet])
def test_all_kinds_of_file_give_the_same_rows(make: Any, tmp_path: Path) -> None:
    assert read(make(tmp_path)) == [Row(number, row) for number, row in enumerate(ROWS, start=1)]


def test_jsonl_numbers_are_lines_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '\n{"a": 1}\r\n  \n{"a": 2}')
    assert read(path) == [Row(2, {"a": 1}), Row(4, {"a": 2})]


def test_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}')) == [Row(1, {"a": 1})]
    assert read(write(tmp_path / "a.csv", b"\xef\xbb\xbfa\n1")) == [Row(1, {"a": "1"})]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1', "broken JSON: "),
        (b'{"a": "\xff"}', "invalid UTF-8: byte 8 of the line"),
        (b"[1]", "not an object: list"),
        (b"null", "not an object: NoneType"),
        (b"[" * 100_000, "broken JSON: "),
        (b"9" * 10_000, "broken JSON: "),
    ],
)
def test_broken_line_has_number_and_reason_and_the_next_is_read(
    line: bytes, reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    first, broken, last = read(path)
    assert (first, last) == (Row(1, {"a": 1}), Row(3, {"a": 3}))
    assert isinstance(broken, BrokenRow)
    assert broken.number == 2
    assert broken.reason.startswith(reason)


def test_previews_are_short_and_can_be_written_as_utf8(tmp_path: Path) -> None:
    long = json.dumps({"a": "\ud800" + "x" * 10_000})
    path = write(tmp_path / "a.jsonl", long + "\n" + long[:-1])
    previews = [row.preview for row in read(path)]
    assert all(len(text.encode()) <= 4 * 160 for text in previews)


def test_json_items_that_are_no_objects_are_broken_rows(tmp_path: Path) -> None:
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
def test_json_that_cannot_be_read_on_stops(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason):
        read(write(tmp_path / "a.json", text))


def test_csv_rows_of_other_width_or_encoding_are_broken(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"a,b\n1\n1,2,3\n\n\xff,2\n1,2\n")
    reasons = [row.reason if isinstance(row, BrokenRow) else "" for row in read(path)]
    assert reasons == [
        "wrong number of fields: 1, the header has 2",
        "wrong number of fields: 3, the header has 2",
        "invalid UTF-8",
        "",
    ]


def test_csv_field_may_be_longer_than_pythons_default_limit(tmp_path: Path) -> None:
    (row,) = read(write(tmp_path / "a.csv", "a\n" + "x" * 200_000))
    assert row == Row(1, {"a": "x" * 200_000})


def test_csv_quote_that_never_closes_stops(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="broken CSV near line 3"):
        read(write(tmp_path / "a.csv", 'a\n"open\nrest'))


def test_csv_header_that_repeats_a_name_stops(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names a more than once"):
        read(write(tmp_path / "a.csv", "a,b,a\n1,2,3"))


@pytest.mark.parametrize(
    ("name", "content", "finding"),
    [
        ("a.jsonl", b"\x89PNG\r\n", "the content is a PNG image"),
        ("a.csv", b"PK\x03\x04", "a ZIP archive"),
        ("a.json", b"\xff\xfe[\0", "UTF-16 text"),
        ("a.jsonl", b"\x7fELF\0", "binary data"),
        ("a.csv", b"a\0b", "binary data"),
        ("a.jsonl", b'\n [{"a": 1}]', "one JSON array, which belongs into a .json file"),
        ("a.jsonl", b"PAR1", "the content is Parquet"),
        ("a.parquet", b'{"a": 1}', "lacks the mark PAR1"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
    ],
)
def test_file_that_is_not_what_its_name_says_stops(
    name: str, content: bytes, finding: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"data\.train = '.*{name}': .*{finding}"):
        read(write(tmp_path / name, content))


def test_truncated_parquet_stops(tmp_path: Path) -> None:
    path = parquet(tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="Parquet cannot be read after row 0"):
        read(path)


def test_unknown_extension_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is none of \.jsonl, .*, \.parquet, .*data\.file_type"):
        read(write(tmp_path / "a.xml", "x"))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read \\(No such file"):
        read(tmp_path / "none.jsonl")


def test_columns_are_those_of_all_first_objects(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 'broken\n{"b": 1}\n{"a": 1, "b": 2}\n')
    assert columns(path) == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "a,b\n")]
)
def test_file_without_rows_stops(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the file holds no row"):
        columns(write(tmp_path / name, text))
