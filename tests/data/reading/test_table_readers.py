"""Rows of Parquet and Arrow files hold the values that `datasets` gives."""

from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, Json, LargeList, List, Value

from workflow.lib.data.reading.chunks import BrokenRow, Row
from workflow.lib.data.reading.data_file import read_rows

TURN = {"role": Value("string"), "content": Value("string"), "more": Json()}
COLUMNS: dict[str, tuple[Any, list[Any]]] = {
    "json": (Json(), ['say "ñ"', 3, None, {"a": None, "b": [1, "x"]}, "null"]),
    "json in a list": (List(Json()), [["x", {"a": None}], [], None, [None, "3"], ["12"]]),
    "json in a large list": (LargeList(Json()), [["x"], [], [1], [None], [{}]]),
    "json in a struct": (
        {"k": Json(), "p": Value("string")},
        [{"k": {"z": 1}, "p": "q"}, {"k": [1], "p": None}, None, {"k": None, "p": "3"}, {"k": "s"}],
    ),
    "turns with json": (
        List(TURN),
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


def read(path):
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
    assert read(tmp_path / "a.parquet") == by_datasets(tmp_path / "a.parquet", "parquet")
    assert read(tmp_path / "a.parquet") == read(arrow) == list(written)


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
    assert read(tmp_path / "a.parquet") == by_datasets(tmp_path / "a.parquet", "parquet")


def test_map_is_an_object(tmp_path):
    items = pyarrow.array(['"x"', "1"], pyarrow.json_())
    column = pyarrow.MapArray.from_arrays([0, 2, 2], ["a", "b"], items)
    pyarrow.parquet.write_table(pyarrow.table({"c": column}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [{"c": {"a": "x", "b": 1}}, {"c": {}}]


def test_broken_json_in_a_column_of_json_breaks_its_row_alone(tmp_path):
    column = pyarrow.array(['"x"', "{", '{"a": 1, "a": 2}', "2"], pyarrow.json_())
    pyarrow.parquet.write_table(pyarrow.table({"c": column}), tmp_path / "a.parquet")
    rows = list(read_rows(tmp_path / "a.parquet", setting="data.train"))
    assert [row.number for row in rows if isinstance(row, BrokenRow)] == [2, 3]
    assert read(tmp_path / "a.parquet") == [{"c": "x"}, {"c": 2}]


def test_json_in_a_column_of_json_may_not_nest_deeply(tmp_path):
    column = pyarrow.array(["1", "[" * 200 + "]" * 200], pyarrow.json_())
    pyarrow.parquet.write_table(pyarrow.table({"c": column}), tmp_path / "a.parquet")
    first, deep = read_rows(tmp_path / "a.parquet", setting="data.train")
    assert first == Row(1, {"c": 1})
    assert isinstance(deep, BrokenRow)
    assert deep.reason.startswith("nested too deeply")
