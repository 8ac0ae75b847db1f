"""Reading data files: every row is yielded with its number, whole or broken; other files are
refused.
"""

import contextlib
import gzip
import json
import pickle
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from workflow.lib.data.reading import chunks as chunks_module
from workflow.lib.data.reading import compression, json_reader, table_readers, text_readers
from workflow.lib.data.reading.data_file import column_names, read_chunks, read_rows
from workflow.lib.data.reading.file_types import file_type_of
from workflow.lib.data.reading.row import BrokenRow, Row
from workflow.lib.data.reading.sources import SourceFile, resolve_splits
from workflow.lib.settings.data import DataConfig, FileType
from workflow.lib.system.errors import UserError

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


def tsv(path: Path) -> Path:
    return write(path / "a.tsv", 'text\n"one, ""two"""\n"drei\nvier — 五"\n""\n')


def json_named_lines(path: Path) -> Path:
    return write(path / "b.json", "".join(json.dumps(row) + "\n" for row in ROWS))


def arrow(path: Path, *, stream: bool = False) -> Path:
    table = pyarrow.Table.from_pylist(ROWS)
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    name = path / ("stream.arrow" if stream else "file.arrow")
    with new(name, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return name


def arrow_stream(path: Path) -> Path:
    return arrow(path, stream=True)


MAKERS = [jsonl, json_array, json_named_lines, csv_file, tsv, parquet, arrow, arrow_stream]
EXPECTED = [Row(number, row) for number, row in enumerate(ROWS, start=1)]


@pytest.mark.parametrize("make", MAKERS)
def test_all_kinds_of_file_give_the_same_rows(make: Any, tmp_path: Path) -> None:
    assert read(make(tmp_path)) == EXPECTED


@pytest.mark.parametrize(("suffix", "codec"), [(".gz", "gzip"), (".zst", "zstd")])
@pytest.mark.parametrize("make", MAKERS)
def test_compressed_file_gives_the_same_rows(
    make: Any, suffix: str, codec: str, tmp_path: Path
) -> None:
    plain = make(tmp_path)
    packed = plain.with_name(plain.name + suffix)
    with pyarrow.CompressedOutputStream(str(packed), codec) as file:
        file.write(plain.read_bytes())
    assert read(packed) == EXPECTED


@pytest.mark.parametrize("make", MAKERS)
def test_chunks_of_any_size_are_the_same_rows_after_a_journey_to_another_process(
    make: Any, tmp_path: Path
) -> None:
    path = make(tmp_path)
    for size in (1, 2, 7):
        chunks = list(read_chunks(path, setting="data.train", rows_per_chunk=size))
        assert all(len(chunk.rows()) <= size for chunk in chunks)
        sent = pickle.loads(pickle.dumps(chunks))
        assert [row for chunk in sent for row in chunk.rows()] == EXPECTED


@pytest.mark.parametrize("make", MAKERS)
def test_damaged_file_gives_rows_or_a_user_error_and_nothing_else(
    make: Any, tmp_path: Path
) -> None:
    path = make(tmp_path)
    whole = path.read_bytes()
    dice = random.Random(0)
    for _ in range(40):
        damaged = bytearray(whole[: dice.randrange(1, 2 * len(whole))])
        for _ in range(dice.choice([0, 1, 3, 30])):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            assert all(row.preview.isprintable() for row in read(path))


def test_two_compressed_files_behind_each_other_are_one(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"a": 1}\n') + gzip.compress(b'{"a": 2}\n')
    assert read(write(tmp_path / "a.jsonl.gz", packed)) == [Row(1, {"a": 1}), Row(2, {"a": 2})]


@pytest.mark.parametrize("keep", [-5, 30])
def test_compressed_file_that_is_cut_off_stops(keep: int, tmp_path: Path) -> None:
    packed = gzip.compress(random.Random(0).randbytes(5000).hex().encode())
    with pytest.raises(UserError, match=r"data\.train = .*cannot be read"):
        read(write(tmp_path / "a.jsonl.gz", packed[:keep]))


def test_compressed_name_of_a_plain_file_stops(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.train = .*cannot be read"):
        read(write(tmp_path / "a.jsonl.gz", '{"a": 1}'))


def test_file_type_may_be_given_for_a_name_that_does_not_tell_it(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.dat", '{"a": 1}')
    assert read(path, "jsonl") == [Row(1, {"a": 1})]


TEXT = b"\xef\xbb\xbfOne\r\ntwo\n\n \nthree \xe4\xba\x94\n"


@pytest.mark.parametrize(
    ("file_type", "rows"),
    [
        (None, [(1, "One\r\ntwo\n\n \nthree 五\n")]),
        ("text_lines", [(1, "One"), (2, "two"), (5, "three 五")]),
        ("text_paragraphs", [(1, "One\r\ntwo"), (5, "three 五")]),
    ],
)
def test_plain_text_is_one_document_or_its_lines_or_paragraphs(
    file_type: Any, rows: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.txt", TEXT)
    assert read(path, file_type) == [Row(number, {"text": text}) for number, text in rows]


def test_plain_text_that_is_not_utf8_is_a_broken_row(tmp_path: Path) -> None:
    (row,) = read(write(tmp_path / "a.txt", b"abc\xff"))
    assert isinstance(row, BrokenRow)
    assert row.reason == "invalid UTF-8: byte 4 of the text"


def test_saved_dataset_is_read_as_it_was(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=2)
    config = DataConfig.model_validate({"train": "saved", "heldout": None})
    (source,) = resolve_splits(config, root=tmp_path)["train"]
    rows = [row for file in source.files for row in read(file.path, file.file_type)]
    assert [row.value for row in rows if isinstance(row, Row)] == ROWS


def test_null_fields_of_structs_in_a_table_are_no_keys(tmp_path: Path) -> None:
    values = [{"m": [{"role": "a"}, {"content": "b"}], "top": None}, {"m": [], "top": 1}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "a.parquet")
    rows = [row.value for row in read(tmp_path / "a.parquet") if isinstance(row, Row)]
    assert rows == values


def test_invalid_utf8_in_a_table_is_a_broken_row(tmp_path: Path) -> None:
    buffers = [
        None,
        pyarrow.array([0, 1, 2], pyarrow.int32()).buffers()[1],
        pyarrow.py_buffer(b"a\xff"),
    ]
    column = pyarrow.StringArray.from_buffers(2, buffers[1], buffers[2])
    pyarrow.parquet.write_table(pyarrow.table({"t": column}), tmp_path / "a.parquet")
    first, second = read(tmp_path / "a.parquet")
    assert first == Row(1, {"t": "a"})
    assert second == BrokenRow(2, "invalid UTF-8", "")


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of memory so small that a test reaches them."""
    for module in (chunks_module, text_readers, json_reader):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(text_readers, "MAX_SKIPPED_BYTES", 32_000)
    monkeypatch.setattr(text_readers, "MAX_BLANK_LINES", 50)
    monkeypatch.setattr(json_reader, "BUFFER_CHARS", 16)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_line_beyond_the_bound_is_refused_unread_and_the_next_is_read(
    name: str, tmp_path: Path
) -> None:
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
def test_file_without_breaks_between_rows_is_not_read_to_its_end(
    file_type: FileType, what: str, tmp_path: Path
) -> None:
    rest = "x" * 40_000 if what == "line 2" else "x\n" * 20_000
    path = write(tmp_path / "a", "\n" + rest)
    with pytest.raises(UserError, match=rf"train = '.*{what} goes on for more than .* Repair"):
        read(path, file_type)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("file_type", ["jsonl", "json", "csv", "text_lines", "text_paragraphs"])
def test_blank_lines_without_end_are_not_read_to_their_end(
    file_type: FileType, tmp_path: Path
) -> None:
    start = {"json": "[", "csv": "a\n1\n"}.get(file_type, "")
    path = write(tmp_path / "a.gz", gzip.compress(start.encode() + b"\n" * 5000))
    with pytest.raises(UserError, match=r"train = '.*(blank lines stand before|of blanks follow)"):
        read(path, file_type)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("file_type", ["jsonl", "csv", "text_lines"])
def test_some_blank_lines_are_passed_over(file_type: FileType, tmp_path: Path) -> None:
    line = {"csv": "1", "jsonl": '{"a": 1}'}.get(file_type, "x")
    start = "a\n" if file_type == "csv" else ""
    path = write(tmp_path / "a", start + f"{line}\n" * 3 + "\n" * 40 + line)
    assert len(read(path, file_type)) == 4


@pytest.mark.usefixtures("small_limits")
def test_csv_record_of_many_lines_is_not_read_to_its_end(tmp_path: Path) -> None:
    field = '"' + "x\n" * 300 + '"'
    read(write(tmp_path / "a.csv", f"a\n{field}\n{field}\n"))
    with pytest.raises(UserError, match=r"near line .*: a record is longer than"):
        read(write(tmp_path / "b.csv", f"a,b\n{field},{field}\n"))


def test_header_of_very_many_columns_is_checked(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(300_000)]
    (row,) = read(write(tmp_path / "a.csv", ",".join(names) + "\n" + "1," * 299_999 + "1\n"))
    assert isinstance(row, Row)
    assert len(row.value) == 300_000
    with pytest.raises(UserError, match="the header names c7 more than once"):
        read(write(tmp_path / "b.csv", ",".join([*names, "c7"]) + "\n"))


@pytest.mark.parametrize(("suffix", "codec"), [(".gz", "gzip"), (".zst", "zstd")])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_file_that_unpacks_to_far_more_than_it_is_stops(
    name: str, suffix: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "MIN_UNPACKED_BYTES", 10**6)
    packed = tmp_path / (name + suffix)
    with pyarrow.CompressedOutputStream(str(packed), codec) as file:
        file.write(b"PAR1" if name == "a.parquet" else b"")
        for _ in range(40):
            file.write(b'{"a": 1}\n' * 100_000)
    with pytest.raises(UserError, match=r"unpacks to more than 500 times its size.*unpack it your"):
        read(packed)


@pytest.mark.usefixtures("small_limits")
def test_row_of_a_table_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    values = [{"a": "x"}, {"a": "y" * 5000}, {"a": "z"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "a.parquet")
    first, large, last = read(tmp_path / "a.parquet")
    assert (first, last) == (Row(1, values[0]), Row(3, values[2]))
    assert isinstance(large, BrokenRow)
    assert (large.number, large.reason.split(":")[0]) == (2, "too large")


def test_chunk_of_a_table_is_small_where_its_rows_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_readers, "CHUNK_BYTES", 2000)
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
def test_paragraph_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    text = "a\n\n" + "b\n" * 2000 + "\nc"
    rows = read(write(tmp_path / "a.txt", text), "text_paragraphs")
    assert [(row.number, type(row)) for row in rows] == [(1, Row), (3, BrokenRow), (2004, Row)]


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "a\n" + "x" * 5000),
        ("a.csv", 'a\n"' + "x\n" * 5000),
        ("a.json", '[{"a": "' + "x" * 5000 + '"}]'),
    ],
)
def test_endless_record_of_a_file_without_lines_stops(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"longer than|larger than"):
        read(write(tmp_path / name, text))


@pytest.mark.parametrize("buffer", [1, 2, 3, 5, 16, 64])
def test_json_array_is_read_the_same_in_pieces_of_any_size(
    buffer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_invalid_utf8_in_a_json_array_breaks_its_row_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", b'[{"a": "\xff"}, {"a": 2}]')
    first, second = read(path)
    assert isinstance(first, BrokenRow)
    assert first.reason == "invalid UTF-8"
    assert second == Row(2, {"a": 2})


def test_jsonl_numbers_are_lines_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '\n{"a": 1}\r\n  \n{"a": 2}')
    assert read(path) == [Row(2, {"a": 1}), Row(4, {"a": 2})]


@pytest.mark.parametrize(("file_type", "size"), [("jsonl", 2), ("text_lines", 2), ("jsonl", 9)])
def test_rows_and_blank_lines_add_up_to_the_lines(
    file_type: FileType, size: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "a", '\n{"a": 1}\n\n  \r\n{"a": 2}\n{"a": 3}\n\n\n\n')
    chunks = list(read_chunks(path, setting="", file_type=file_type, rows_per_chunk=size))
    assert sum(len(chunk.rows()) for chunk in chunks) == 3
    assert sum(chunk.blank_lines for chunk in chunks) == 6


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
        (b'{"a": 1, "a": 2}', "broken JSON: an object has the same key twice"),
        (b'{"a": {"b": 1, "b": 1}}', "broken JSON: an object has the same key twice"),
        (b'{"a": "\0"}', "broken JSON: "),
        (b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}", "nested too deeply: more than 64 levels"),
        (b"[" * 900 + b"]" * 900, "nested too deeply: "),
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


def test_what_a_terminal_obeys_is_spelled_out_in_previews(tmp_path: Path) -> None:
    hostile = "\x1b[31mred\x9b1m\u202etfel\x00\u2028"
    path = write(tmp_path / "a.jsonl", json.dumps({"a": hostile}) + "\n{" + hostile)
    assert all(row.preview.isprintable() for row in read(path))
    assert r"\x9b1m\u202etfel" in read(path)[0].preview


def test_numbers_that_json_lacks_are_data(tmp_path: Path) -> None:
    (row,) = read(write(tmp_path / "a.jsonl", '{"a": "x", "score": NaN, "b": -Infinity}'))
    assert isinstance(row, Row)
    assert row.value["a"] == "x"


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


def test_semicolons_part_the_fields_where_the_header_has_no_comma(tmp_path: Path) -> None:
    text = 'question;answer\n"How; and why, if at all?";1,5\n'
    assert read(write(tmp_path / "a.csv", text)) == [
        Row(1, {"question": "How; and why, if at all?", "answer": "1,5"})
    ]
    assert read(write(tmp_path / "b.csv", "a;b,c\n1;2,3\n")) == [Row(1, {"a;b": "1;2", "c": "3"})]


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
