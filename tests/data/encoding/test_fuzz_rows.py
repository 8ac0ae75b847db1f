"""Whatever bytes a data file or a checkpoint has, a person gets rows or a message, never a
traceback.

Files are whole ones with bytes changed, cut out, doubled and put in; rows go on to samples, tokens
and listings."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.tiny import tiny_tokenizer
from workflow.lib.data.encoding.keys_read import KeyAccount
from workflow.lib.data.encoding.preference_rows import begin_judged, to_judged
from workflow.lib.data.encoding.row_columns import FORMATS
from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.data.encoding.tokenizer import read_chat_template
from workflow.lib.data.reading.chunks import BrokenRow, Row
from workflow.lib.data.reading.data_file import read_rows
from workflow.lib.model.published.loaded_files import loaded_tensors
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.settings.config import DataColumns
from workflow.lib.system.errors import UserError

FUZZED = settings(
    max_examples=120,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
ROWS: list[dict[str, Any]] = [
    {"prompt": "What is 1?", "completion": 'One, "quoted"\nand more.'},
    {"prompt": "ß数\u202e", "completion": ""},
    {"prompt": "3", "completion": "three <|im_start|>"},
]
TALKS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x\n"}]},
]


def jsonl(path):
    lines = [json.dumps(row, ensure_ascii=False) for row in [*ROWS, *TALKS]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def json_array(path):
    path.write_text(json.dumps([*TALKS, *ROWS], indent=1), encoding="utf-8")


def csv(path):
    path.write_text('prompt,completion\n"a ""b""\nc",d\nß,数\n', encoding="utf-8")


def parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


WRITERS: dict[str, Callable[[Path], None]] = {
    ".jsonl": jsonl,
    ".json": json_array,
    ".csv": csv,
    ".parquet": parquet,
}
PLACE = st.floats(0, 1, exclude_max=True)
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["change", "cut", "double", "insert", "end"]),
        PLACE,
        PLACE,
        st.binary(min_size=1, max_size=6)
        | st.sampled_from(
            [b'"', b"\n", b"\0", b"\xff", b"[" * 5000, b"1e999", b"NaN", b"\\ud800", b","]
        ),
    ),
    min_size=1,
    max_size=5,
)


def mutated(content, edits):
    """Return `content` after `edits`, each at a place and over a stretch given as shares of the
    length."""
    for kind, start, length, new in edits:
        first = int(start * len(content))
        last = first + int(length * min(64, len(content) - first))
        middle = {
            "change": new,
            "cut": b"",
            "double": content[first:last] * 2,
            "insert": new + content[first:last],
            "end": b"",
        }[kind]
        content = content[:first] + middle + (b"" if kind == "end" else content[last:])
    return content


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def encoder(tokenizer):
    template = read_chat_template(tokenizer, None)
    return SampleEncoder(tokenizer, chat_template=template, loss_on="completions")


def use(path, encoder):
    """Read a file as the tokenization does, as every format that its columns allow."""
    for row in list(rows(path)):
        if isinstance(row, BrokenRow):
            assert (row.reason + row.preview).encode()
            continue
        assert row.preview.encode()
        encode(row, encoder)


def rows(path):
    refusal = ""
    try:
        yield from read_rows(path, setting="data.train")
    except UserError as error:
        refusal = str(error)
    assert refusal == refusal.encode().decode()


def encode(row, encoder):
    """Encode a row by every format, as a text, as a pair and as rated."""
    for format, rated in [(f, None) for f in FORMATS["texts"]] + [
        (f, examples == "rated") for examples in ("pairs", "rated") for f in FORMATS[examples]
    ]:
        reason = ""
        given = {"format": format, "columns": DataColumns()}
        try:
            if rated is None:
                encoder.encode(to_sample(row.value, **given))
            else:
                judged = to_judged(row.value, **given, keys=KeyAccount(), rated=rated)
                begin_judged(encoder, judged)()
        except RowError as error:
            reason = str(error)
        assert reason == reason.encode().decode()


@pytest.mark.parametrize("suffix", WRITERS)
@FUZZED
@given(edits=EDITS)
def test_no_bytes_of_a_data_file_end_in_a_traceback(tmp_path, encoder, suffix, edits):
    path = tmp_path / f"rows{suffix}"
    WRITERS[suffix](path)
    path.write_bytes(mutated(path.read_bytes(), edits))
    use(path, encoder)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("\ud800"),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "text",
                    "type",
                    "weight",
                    "tool_calls",
                    "function",
                    "from",
                    "value",
                ]
            ),
            below,
            max_size=3,
        )
    ),
    max_leaves=6,
)


COLUMNS = ["messages", "prompt", "completion", "text", "instruction", "output", "conversations"]
COLUMNS += ["tools", "input_ids", "labels", "loss_mask", "chosen", "rejected", "answers", "label"]


@FUZZED
@given(row=st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=4))
def test_no_values_of_a_row_end_in_a_traceback(encoder, row):
    encode(Row(1, row), encoder)
    assert Row(1, row).preview.encode()


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@FUZZED
@given(edits=EDITS)
@example(edits=[("change", 0.5, 0.0, b"[" * 5000)])
@example(edits=[("change", 0.5, 0.0, b"\\ud800")])
@example(edits=[("change", 0.5, 0.0, b"\\u0000")])
def test_no_bytes_of_a_checkpoint_end_in_a_traceback(tmp_path, name, edits):
    write_checkpoint(tmp_path)
    path = tmp_path / name
    path.write_bytes(mutated(path.read_bytes(), edits))
    if name == "model.safetensors":
        (tmp_path / "model.safetensors.index.json").unlink()
    for read in (loaded_tensors, read_all):
        refusal = ""
        try:
            read(tmp_path)
        except UserError as error:
            refusal = str(error)
        assert refusal == refusal.encode().decode()


def write_checkpoint(folder):
    header = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "U8", "shape": [5], "data_offsets": [24, 29]},
        "__metadata__": {"format": "pt"},
    }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(29))
    index = {"weight_map": dict.fromkeys(["a", "b"], "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_all(folder):
    with CheckpointReader(folder) as reader:
        for name in reader.names():
            reader.tensor(name)
            reader.rows(name, 0, 1)
