"""Whatever bytes a data file or a checkpoint has, a person gets rows or a message, never a
traceback.

Files are whole ones with bytes changed, cut out, doubled and put in; rows of any values go on to
samples, tokens and listings."""

import json
import math
import struct
from datetime import date, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.data.reading.test_data_file import MAKERS
from tests.support.encoding import TOOL_TEMPLATE
from workflow.lib.checkpoints.checkpoint import loaded_tensors
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.data.encoding.keys_read import KeyAudit
from workflow.lib.data.encoding.preference_rows import begin_judged, to_judged
from workflow.lib.data.encoding.row_columns import FORMATS
from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.data.reading.data_file import read_rows
from workflow.lib.data.reading.row_chunks import BrokenRow, Row
from workflow.lib.settings.config import DataColumns
from workflow.lib.system.errors import UserError

FUZZED = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
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
def encoder(tokenizer):
    template = "{{ (enable_thinking, note) | string }}" + TOOL_TEMPLATE
    return SampleEncoder(tokenizer, chat_template=template, loss_on="completions")


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
                judged = to_judged(row.value, **given, keys=KeyAudit(), rated=rated)
                begin_judged(encoder, judged)()
        except RowError as error:
            reason = str(error)
        assert reason == reason.encode().decode()


@pytest.mark.parametrize("make", MAKERS)
@FUZZED
@given(edits=EDITS)
def test_no_bytes_of_a_data_file_end_in_a_traceback(tmp_path, make, edits):
    path = make(tmp_path)
    path.write_bytes(mutated(path.read_bytes(), edits))
    for row in rows(path):
        assert row.preview.isprintable()
        if isinstance(row, BrokenRow):
            assert row.reason.encode()


KEYS = [
    *("messages", "prompt", "completion", "text", "instruction", "output", "conversations"),
    *("tools", "input_ids", "labels", "loss_mask", "attention_mask", "chosen", "rejected"),
    *("answers", "label", "score_chosen", "role", "from", "content", "value", "type", "weight"),
    *("tool_calls", "function_call", "function", "name", "arguments", "system", "history"),
    *("reasoning", "train", "images", "chat_template_kwargs", "metadata", "rank"),
]
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
WORDS = ["user", "assistant", "tool", "gpt", "function_call", "f", "", "{}", "[]", '{"name": "f"}']
WORDS += [
    "tool_use",
    "tool_result",
    "thinking",
    "tool-call",
    "\ud800",
    "\x1b",
    "\n\nHuman: q\n\nAssistant: a",
]
WORDS += ['{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}', '{"a": "\\ud800"}']
OF_TABLES = [datetime(2024, 7, 26), date(2024, 7, 26), timedelta(1), Decimal("1.5"), b"x"]
SCALARS = st.sampled_from([None, True, 0, 1, -100, 10**30, 0.5, math.nan, *OF_TABLES, *WORDS])
VALUES = st.recursive(
    SCALARS | st.sampled_from([TALK, TALK[:1], TALK[1:]]) | st.text(max_size=8),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(KEYS), below, max_size=4)
    ),
    max_leaves=12,
)


@settings(FUZZED, max_examples=250)
@given(row=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
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
