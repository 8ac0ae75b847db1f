"""Files made to take all time, memory or disk are stopped at a bound, by one message."""

import gzip
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.data_files import compressed, read, write
from workflow.lib.data.reading import compression, data_file, text_readers
from workflow.lib.data.reading import row_chunks as chunks_module
from workflow.lib.data.reading.data_file import read_chunks
from workflow.lib.data.reading.row_chunks import BrokenRow, Row
from workflow.lib.system.errors import UserError


@pytest.fixture
def small_limits(monkeypatch):
    for module in (chunks_module, text_readers, data_file):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(text_readers, "MAX_SKIPPED_BYTES", 32_000)
    monkeypatch.setattr(text_readers, "MAX_BLANK_LINES", 50)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_line_beyond_the_bound_is_refused_unread_and_the_next_is_read(name, tmp_path):
    lines = ['{"a": 1}', '{"a": "' + "x" * 5000 + '"}', '{"a": 3}']
    kind: Any = None if name.endswith("jsonl") else "text_lines"
    first, large, last = read(write(tmp_path / name, "\n".join(lines)), kind)
    assert isinstance(large, BrokenRow)
    assert (first.number, large.number, last.number) == (1, 2, 3)
    assert large.reason.startswith("too large: ")
    assert large.preview.startswith('{"a": "xxx')
    assert isinstance(last, Row)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    ("file_type", "what"),
    [("jsonl", "line 2"), ("text_lines", "line 2"), ("text_paragraphs", "the paragraph at line 2")],
)
def test_file_without_breaks_between_rows_is_not_read_to_its_end(file_type, what, tmp_path):
    rest = "x" * 40_000 if what == "line 2" else "x\n" * 20_000
    path = write(tmp_path / "a", "\n" + rest)
    with pytest.raises(UserError, match=rf"train = '.*{what} goes on for more than .* Repair"):
        read(path, file_type)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("file_type", ["jsonl", "csv", "text_lines", "text_paragraphs"])
def test_blank_lines_without_end_are_not_read_to_their_end(file_type, tmp_path):
    start = "a\n1\n" if file_type == "csv" else ""
    path = write(tmp_path / "a.gz", gzip.compress(start.encode() + b"\n" * 5000))
    with pytest.raises(UserError, match=r"train = '.*blank lines stand before"):
        read(path, file_type)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("file_type", ["jsonl", "csv", "text_lines"])
def test_some_blank_lines_are_passed_over(file_type, tmp_path):
    line = {"csv": "1", "jsonl": '{"a": 1}'}.get(file_type, "x")
    start = "a\n" if file_type == "csv" else ""
    path = write(tmp_path / "a", start + f"{line}\n" * 3 + "\n" * 40 + line)
    assert len(read(path, file_type)) == 4


@pytest.mark.usefixtures("small_limits")
def test_csv_record_of_many_lines_is_not_read_to_its_end(tmp_path):
    field = '"' + "x\n" * 300 + '"'
    read(write(tmp_path / "a.csv", f"a\n{field}\n{field}\n"))
    with pytest.raises(UserError, match=r"near line .*: a record is longer than"):
        read(write(tmp_path / "b.csv", f"a,b\n{field},{field}\n"))


def test_header_of_very_many_columns_is_checked(tmp_path):
    names = [f"c{number}" for number in range(300_000)]
    (row,) = read(write(tmp_path / "a.csv", ",".join(names) + "\n" + "1," * 299_999 + "1\n"))
    assert isinstance(row, Row)
    assert len(row.value) == 300_000
    with pytest.raises(UserError, match="the header names c7 more than once"):
        read(write(tmp_path / "b.csv", ",".join([*names, "c7"]) + "\n"))


@pytest.mark.parametrize(
    ("suffix", "codec"), [(".gz", "gzip"), (".zst", "zstd"), (".bz2", "bz2"), (".xz", "xz")]
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_file_that_unpacks_to_far_more_than_it_is_stops(name, suffix, codec, tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "MIN_UNPACKED_BYTES", 10**6)
    packed = tmp_path / (name + suffix)
    with compressed(packed, codec) as file:
        file.write(b"PAR1" if name == "a.parquet" else b"")
        for _ in range(4):
            file.write(b'{"a": 1}\n' * 100_000)
    with pytest.raises(UserError, match=r"unpacks to more than 500 times its size.*unpack it your"):
        read(packed)


@pytest.mark.usefixtures("small_limits")
def test_row_of_a_table_beyond_the_bound_is_refused(tmp_path):
    values = [{"a": "x"}, {"a": "y" * 5000}, {"a": "z"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "a.parquet")
    first, large, last = read(tmp_path / "a.parquet")
    assert (first, last) == (Row(1, values[0]), Row(3, values[2]))
    assert isinstance(large, BrokenRow)
    assert (large.number, large.reason.split(":")[0]) == (2, "too large")


def test_chunk_of_a_table_is_small_where_its_rows_are_large(tmp_path, monkeypatch):
    monkeypatch.setattr(data_file, "CHUNK_BYTES", 2000)
    table = pyarrow.Table.from_pylist([{"a": str(n) * 900} for n in range(10)])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        chunks = list(read_chunks(tmp_path / name, setting="data.train"))
        sizes = [len(chunk.rows()) for chunk in chunks]
        assert sum(sizes) == 10
        assert max(sizes) <= 2


@pytest.mark.usefixtures("small_limits")
def test_paragraph_beyond_the_bound_is_refused(tmp_path):
    text = "a\n\n" + "b\n" * 2000 + "\nc"
    rows = read(write(tmp_path / "a.txt", text), "text_paragraphs")
    assert [(row.number, type(row)) for row in rows] == [(1, Row), (3, BrokenRow), (2004, Row)]


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("text", ["a\n" + "x" * 5000, 'a\n"' + "x\n" * 5000])
def test_endless_record_of_a_file_without_lines_stops(text, tmp_path):
    with pytest.raises(UserError, match="longer than"):
        read(write(tmp_path / "a.csv", text))


@pytest.mark.usefixtures("small_limits")
def test_element_of_a_json_array_beyond_the_bound_is_refused(tmp_path):
    first, large, last = read(
        write(tmp_path / "a.json", '[{"a": 1}, {"a": "' + "x" * 5000 + '"}, {"a": 3}]')
    )
    assert (first, last) == (Row(1, {"a": 1}), Row(3, {"a": 3}))
    assert isinstance(large, BrokenRow)
    assert large.reason.startswith("too large: ")


def test_json_array_beyond_the_bound_is_refused_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(text_readers, "MAX_JSON_BYTES", 1000)
    assert len(read(write(tmp_path / "a.json", "[" + " " * 998 + "]"))) == 0
    with pytest.raises(UserError, match=r"read whole, and this one has more than .*jq -c"):
        read(write(tmp_path / "b.json", "[" + " " * 999 + "]"))
