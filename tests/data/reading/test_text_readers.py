"""Lines of JSON, plain text and CSV: rows by number, broken rows with their reason."""

import json

import pytest

from tests.support.data_files import read, write
from workflow.lib.data.reading.row_chunks import BrokenRow, Row
from workflow.lib.system.errors import UserError

TEXT = b"\xef\xbb\xbfOne\r\ntwo\n\n \nthree \xe4\xba\x94\n"


@pytest.mark.parametrize(
    ("file_type", "rows"),
    [
        (None, [(1, "One\r\ntwo\n\n \nthree 五\n")]),
        ("text_lines", [(1, "One"), (2, "two"), (5, "three 五")]),
        ("text_paragraphs", [(1, "One\r\ntwo"), (5, "three 五")]),
    ],
)
def test_plain_text_is_one_document_or_its_lines_or_paragraphs(file_type, rows, tmp_path):
    path = write(tmp_path / "a.txt", TEXT)
    assert read(path, file_type) == [Row(number, {"text": text}) for number, text in rows]


def test_plain_text_that_is_not_utf8_is_a_broken_row(tmp_path):
    (row,) = read(write(tmp_path / "a.txt", b"abc\xff"))
    assert isinstance(row, BrokenRow)
    assert row.reason == "invalid UTF-8: byte 4 of the text"


def test_jsonl_numbers_are_lines_and_blank_lines_are_no_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", '\n{"a": 1}\r\n  \n{"a": 2}')
    assert read(path) == [Row(2, {"a": 1}), Row(4, {"a": 2})]


def test_byte_order_mark_is_no_part_of_the_data(tmp_path):
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
        (b'{"a": 1, "a": 2}', "broken JSON: an object has the same key twice"),
        (b'{"a": {"b": 1, "b": 1}}', "broken JSON: an object has the same key twice"),
        (b'{"a": "\0"}', "broken JSON: "),
        (b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}", "nested too deeply: more than 64 levels"),
        (b"[" * 900 + b"]" * 900, "nested too deeply: "),
    ],
)
def test_broken_line_has_number_and_reason_and_the_next_is_read(line, reason, tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    first, broken, last = read(path)
    assert (first, last) == (Row(1, {"a": 1}), Row(3, {"a": 3}))
    assert isinstance(broken, BrokenRow)
    assert broken.number == 2
    assert broken.reason.startswith(reason)


def test_previews_are_short_and_can_be_written_as_utf8(tmp_path):
    long = json.dumps({"a": "\ud800" + "x" * 10_000})
    path = write(tmp_path / "a.jsonl", long + "\n" + long[:-1])
    previews = [row.preview for row in read(path)]
    assert all(len(text.encode()) <= 4 * 160 for text in previews)


def test_what_a_terminal_obeys_is_spelled_out_in_previews(tmp_path):
    hostile = "\x1b[31mred\x9b1m\u202etfel\x00\u2028"
    path = write(tmp_path / "a.jsonl", json.dumps({"a": hostile}) + "\n{" + hostile)
    assert all(row.preview.isprintable() for row in read(path))
    assert r"\x9b1m\u202etfel" in read(path)[0].preview


def test_numbers_that_json_lacks_are_data(tmp_path):
    (row,) = read(write(tmp_path / "a.jsonl", '{"a": "x", "score": NaN, "b": -Infinity}'))
    assert isinstance(row, Row)
    assert row.value["a"] == "x"


def test_csv_rows_of_other_width_or_encoding_are_broken(tmp_path):
    path = write(tmp_path / "a.csv", b"a,b\n1\n1,2,3\n\n\xff,2\n1,2\n")
    reasons = [row.reason if isinstance(row, BrokenRow) else "" for row in read(path)]
    assert reasons == [
        "wrong number of fields: 1, the header has 2",
        "wrong number of fields: 3, the header has 2",
        "invalid UTF-8",
        "",
    ]


def test_semicolons_part_the_fields_where_the_header_has_no_comma(tmp_path):
    text = 'question;answer\n"How; and why, if at all?";1,5\n'
    assert read(write(tmp_path / "a.csv", text)) == [
        Row(1, {"question": "How; and why, if at all?", "answer": "1,5"})
    ]
    assert read(write(tmp_path / "c.csv", text.replace("\n", "\r")))[0].value["answer"] == "1,5"
    assert read(write(tmp_path / "b.csv", "a;b,c\n1;2,3\n")) == [Row(1, {"a;b": "1;2", "c": "3"})]


def test_csv_field_may_be_longer_than_pythons_default_limit(tmp_path):
    (row,) = read(write(tmp_path / "a.csv", "a\n" + "x" * 200_000))
    assert row == Row(1, {"a": "x" * 200_000})


def test_json_array_is_read_element_by_element(tmp_path):
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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('a\n"open\nrest', "broken CSV near line 3"),
        ("a,b,a\n1,2,3", "names a more than once"),
        ('{"a":\n 1}', "no JSON array of objects; one object a line is a .jsonl file"),
        ("3", "no JSON array"),
        ('[{"a": 1}, {"a": ', "broken JSON in row 2"),
        ('[{"a": 1} {"a": 2}]', "after row 1: no comma"),
        ('[{"a": 1}', "after row 1: no comma"),
        ('[{"a": 1}, {"a": "x', "broken JSON in row 2"),
        ('[{"a": 1}, {"a" 2}, ]', "broken JSON in row 2"),
        ('[{"a": 1}] []', "more text follows the array of 1 rows"),
    ],
)
def test_file_that_cannot_be_read_on_stops(text, reason, tmp_path):
    name = "a.csv" if text.startswith("a") else "a.json"
    with pytest.raises(UserError, match=reason):
        read(write(tmp_path / name, text))
