"""Reading data files: all kinds give the same rows, packed or not; files that are not what their
name says are refused."""

import bz2
import gzip
import json
import lzma
import pickle
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, Json, LargeList, List, Value

from tests.support.data_files import compressed, read, write
from workflow.lib.data.reading.compression import COMPRESSIONS, file_type_of
from workflow.lib.data.reading.data_file import column_names, read_chunks, read_rows
from workflow.lib.data.reading.row_chunks import BrokenRow, Row
from workflow.lib.data.reading.sources import SourceFile, resolve_splits
from workflow.lib.settings.data import DataConfig
from workflow.lib.system.errors import UserError

ROWS = [{"text": 'one, "two"'}, {"text": "drei\nvier — 五"}, {"text": ""}]


def columns(*paths):
    files = [SourceFile(path, path.name, file_type_of(path, setting="")) for path in paths]
    return column_names(files, setting="data.train")


def jsonl(path):
    return write(path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))


def json_array(path):
    return write(path / "a.json", json.dumps(ROWS, indent=2))


def csv_file(path):
    return write(path / "a.csv", 'text\n"one, ""two"""\n"drei\nvier — 五"\n""\n')


def parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path / "a.parquet")
    return path / "a.parquet"


def tsv(path):
    return write(path / "a.tsv", 'text\n"one, ""two"""\n"drei\nvier — 五"\n""\n')


def json_named_lines(path):
    return write(path / "b.json", "".join(json.dumps(row) + "\n" for row in ROWS))


def arrow(path, *, stream=False):
    table = pyarrow.Table.from_pylist(ROWS)
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    name = path / ("stream.arrow" if stream else "file.arrow")
    with new(name, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return name


def arrow_stream(path):
    return arrow(path, stream=True)


MAKERS = [jsonl, json_array, json_named_lines, csv_file, tsv, parquet, arrow, arrow_stream]
EXPECTED = [Row(number, row) for number, row in enumerate(ROWS, start=1)]


@pytest.mark.parametrize("make", MAKERS)
def test_all_kinds_of_file_give_the_same_rows(make, tmp_path):
    assert read(make(tmp_path)) == EXPECTED


@pytest.mark.parametrize(
    ("suffix", "codec"), [(".gz", "gzip"), (".zst", "zstd"), (".bz2", "bz2"), (".xz", "xz")]
)
@pytest.mark.parametrize("make", MAKERS)
def test_compressed_file_gives_the_same_rows(make, suffix, codec, tmp_path):
    plain = make(tmp_path)
    packed = plain.with_name(plain.name + suffix)
    with compressed(packed, codec) as file:
        file.write(plain.read_bytes())
    assert read(packed) == EXPECTED


@pytest.mark.parametrize("make", MAKERS)
def test_chunks_of_any_size_are_the_same_rows_after_a_journey_to_another_process(make, tmp_path):
    path = make(tmp_path)
    for size in (1, 2, 7):
        chunks = list(read_chunks(path, setting="data.train", rows_per_chunk=size))
        assert all(len(chunk.rows()) <= size for chunk in chunks)
        sent = pickle.loads(pickle.dumps(chunks))
        assert [row for chunk in sent for row in chunk.rows()] == EXPECTED


def test_two_compressed_files_behind_each_other_are_one(tmp_path):
    packed = gzip.compress(b'{"a": 1}\n') + gzip.compress(b'{"a": 2}\n')
    assert read(write(tmp_path / "a.jsonl.gz", packed)) == [Row(1, {"a": 1}), Row(2, {"a": 2})]


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_name_of_a_plain_file_stops(suffix, tmp_path):
    with pytest.raises(UserError, match=r"data\.train = .*cannot be read"):
        read(write(tmp_path / f"a.jsonl{suffix}", '{"a": 1}'))


@pytest.mark.parametrize(("suffix", "pack"), [(".bz2", bz2.compress), (".xz", lzma.compress)])
def test_compressed_file_that_is_cut_off_stops(suffix, pack, tmp_path):
    packed = pack(b'{"a": 1}\n' * 9000)
    with pytest.raises(UserError, match=r"data\.train = .*cannot be read \(.*ended before"):
        read(write(tmp_path / f"a.jsonl{suffix}", packed[: len(packed) // 2]))


BOM = "\ufeff"


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.jsonl", f'{BOM}{{"text": "a"}}\n{BOM}{{"text": "b"}}\n', None),
        ("a.csv", f"{BOM}text\na\n{BOM}b\n", None),
        ("a.txt", f"{BOM}a\n{BOM}b\n", "text_lines"),
        ("a.txt", f"{BOM}a\n\n{BOM}b\n", "text_paragraphs"),
    ],
)
def test_byte_order_marks_of_joined_files_are_no_text(name, text, kind, tmp_path):
    rows = read(write(tmp_path / name, text.encode()), kind)
    assert [row.value["text"] for row in rows] == ["a", "b"]


def test_byte_order_marks_within_a_document_are_no_text(tmp_path):
    (row,) = read(write(tmp_path / "a.txt", f"{BOM}a\n{BOM}b\n".encode()))
    assert row.value["text"] == "a\nb\n"


@pytest.mark.parametrize("again", [f"{BOM}prompt,completion", "Prompt, Completion "])
def test_header_of_a_joined_csv_file_is_no_row(again, tmp_path):
    text = f"prompt,completion\na,b\n{again}\nc,d\n"
    first, header, last = read(write(tmp_path / "a.csv", text))
    assert [list(row.value.values()) for row in (first, last)] == [["a", "b"], ["c", "d"]]
    assert header.reason.startswith("header again: ")
    text = text.replace(again, "completion,prompt")
    with pytest.raises(UserError, match=r"record 2 is a header with the columns in another order"):
        read(write(tmp_path / "a.csv", text))


def test_saved_dataset_is_read_as_it_was(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=2)
    config = DataConfig.model_validate({"train": "saved", "heldout": None})
    (source,) = resolve_splits(config, root=tmp_path)["train"]
    rows = [row for file in source.files for row in read(file.path, file.file_type)]
    assert [row.value for row in rows if isinstance(row, Row)] == ROWS


def test_invalid_utf8_in_a_table_is_a_broken_row(tmp_path):
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
def test_file_that_is_not_what_its_name_says_stops(name, content, finding, tmp_path):
    with pytest.raises(UserError, match=rf"data\.train = '.*{name}': .*{finding}"):
        read(write(tmp_path / name, content))


def test_columns_are_those_of_all_first_objects(tmp_path):
    path = write(tmp_path / "a.jsonl", 'broken\n{"b": 1}\n{"a": 1, "b": 2}\n')
    assert columns(path) == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "a,b\n")]
)
def test_file_without_rows_stops(name, text, tmp_path):
    with pytest.raises(UserError, match="the file holds no row"):
        columns(write(tmp_path / name, text))


TURN_FEATURE = {"role": Value("string"), "content": Value("string"), "more": Json()}
COLUMNS: dict[str, tuple[Any, list[Any]]] = {
    "json": (Json(), ['say "ñ"', 3, None, {"a": None, "b": [1, "x"]}, "null"]),
    "json in a list": (List(Json()), [["x", {"a": None}], [], None, [None, "3"], ["12"]]),
    "json in a large list": (LargeList(Json()), [["x"], [], [1], [None], [{}]]),
    "json in a struct": (
        {"k": Json(), "p": Value("string")},
        [{"k": {"z": 1}, "p": "q"}, {"k": [1], "p": None}, None, {"k": None, "p": "3"}, {"k": "s"}],
    ),
    "turns with json": (
        List(TURN_FEATURE),
        [[{"role": "user", "content": "q", "more": {"t": None}}], [], None, [{"role": "a"}], []],
    ),
    "turns with null fields": (
        List({"role": Value("string"), "name": Value("string")}),
        [[{"role": "user", "name": None}], [{"role": "a", "name": "n"}], [], None, []],
    ),
    "class label": (ClassLabel(names=["no", "yes"]), [0, 1, 1, None, 0]),
    "large string": (Value("large_string"), ["a", "", None, "é", "1"]),
    "binary": (Value("binary"), [b"a", b"", None, b"\xff", b"1"]),
    "numbers": (Value("float32"), [1.5, 2.0, None, 0.0, -1.0]),
}


def read_values(path):
    return [row.value for row in read_rows(path, setting="data.train") if isinstance(row, Row)]


def by_datasets(path, kind):
    cache = str(path.parent / "cache")
    return list(datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=cache))


@pytest.mark.parametrize("name", COLUMNS)
def test_every_type_that_datasets_writes_is_read_as_by_datasets(name, tmp_path):
    feature, values = COLUMNS[name]
    written = Dataset.from_dict({"c": values}, features=Features({"c": feature}))
    written.to_parquet(tmp_path / "a.parquet")
    written.save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    assert read_values(tmp_path / "a.parquet") == by_datasets(tmp_path / "a.parquet", "parquet")
    assert read_values(tmp_path / "a.parquet") == read_values(arrow) == list(written)


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array(["x", "y", "x"]).dictionary_encode(),
        pyarrow.array(["x", None, "z"], pyarrow.string_view()),
        pyarrow.array([[1, 2], [3, 4], None], pyarrow.list_(pyarrow.int64(), 2)),
    ],
)
def test_arrow_types_of_other_writers_are_read_as_by_datasets(column, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"c": column}), tmp_path / "a.parquet")
    assert read_values(tmp_path / "a.parquet") == by_datasets(tmp_path / "a.parquet", "parquet")


def test_map_is_an_object(tmp_path):
    items = pyarrow.array(['"x"', "1"], pyarrow.json_())
    column = pyarrow.MapArray.from_arrays([0, 2, 2], ["a", "b"], items)
    pyarrow.parquet.write_table(pyarrow.table({"c": column}), tmp_path / "a.parquet")
    assert read_values(tmp_path / "a.parquet") == [{"c": {"a": "x", "b": 1}}, {"c": {}}]


def test_broken_json_in_a_column_of_json_breaks_its_row_alone(tmp_path):
    column = pyarrow.array(['"x"', "{", '{"a": 1, "a": 2}', "2"], pyarrow.json_())
    pyarrow.parquet.write_table(pyarrow.table({"c": column}), tmp_path / "a.parquet")
    rows = list(read_rows(tmp_path / "a.parquet", setting="data.train"))
    assert [row.number for row in rows if isinstance(row, BrokenRow)] == [2, 3]
    assert read_values(tmp_path / "a.parquet") == [{"c": "x"}, {"c": 2}]


def test_json_in_a_column_of_json_may_not_nest_deeply(tmp_path):
    column = pyarrow.array(["1", "[" * 200 + "]" * 200], pyarrow.json_())
    pyarrow.parquet.write_table(pyarrow.table({"c": column}), tmp_path / "a.parquet")
    first, deep = read_rows(tmp_path / "a.parquet", setting="data.train")
    assert first == Row(1, {"c": 1})
    assert isinstance(deep, BrokenRow)
    assert deep.reason.startswith("nested too deeply")
