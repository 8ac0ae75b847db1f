"""Whatever stands in `config.yaml`, a person gets settings or a message, never a traceback.

The documents are edits of one with every setting: values of any kind at any place, keys renamed,
sections torn out."""

import copy
import json
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workflow.lib.artifacts import layout
from workflow.lib.artifacts.local_inputs import check_local_paths
from workflow.lib.settings.config import Config, load_config
from workflow.lib.settings.section_base import Stage
from workflow.lib.system.errors import UserError, as_yaml

DOCUMENT = Config().model_dump(mode="json") | {
    "runs": {"demo": {"train": {"learning_rate": 0.001}}}
}

EDITED = settings(
    max_examples=200, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def places(node, path=()):
    """Return the path of every key of a document, sections included."""
    if not isinstance(node, dict):
        return []
    below = [place for key, value in node.items() for place in places(value, (*path, key))]
    return [(*path, key) for key in node] + below


TEXTS = "auto 2e-4 1e999 nan -inf .. ../x / ~ a/b --help"
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 2**31, 2**63, 10**400, -(10**400)])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\0", "\ud800", *TEXTS.split()])
    | st.dates()
    | st.binary(max_size=5)
)
KEYS = st.text(max_size=10) | st.integers() | st.none() | st.booleans() | st.tuples(st.integers())
JUNK = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=3),
    max_leaves=8,
)
EDITS = st.lists(
    st.tuples(st.sampled_from(places(DOCUMENT)), st.sampled_from(["set", "drop", "rename"]), JUNK),
    min_size=1,
    max_size=4,
)


def edited(edits):
    """Return the real document after `edits`; an edit whose place is gone does nothing."""
    document = copy.deepcopy(DOCUMENT)
    for (*above, key), kind, junk in edits:
        node: Any = document
        for part in above:
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict) or key not in node:
            continue
        old = node[key] if kind == "set" else node.pop(key)
        if kind == "set":
            node[key] = junk
        elif kind == "rename" and junk.__hash__ is not None:
            node[str(junk)] = old
    return document


def use(run):
    """Do with settings what the Snakefile does when it is parsed."""
    layout.tokens_dir(run), layout.base_dir(run), layout.model_dir(run), layout.data_files(run)
    layout.fingerprint(run)
    for stage in get_args(Stage):
        json.dumps([layout.stage_settings(stage, run), layout.free_settings(stage, run)])


def read_and_use(document):
    """Read settings and use them; a refusal has to be one message that can be printed."""
    refusal = ""
    try:
        for name, run in load_config(document)[1].items():
            check_local_paths(name, run)
            use(run)
    except UserError as error:
        refusal = str(error)
    assert refusal == refusal.encode().decode()


@EDITED
@given(EDITS)
def test_no_edit_of_the_real_settings_ends_in_a_traceback(edits):
    read_and_use(edited(edits))


def nested(depth):
    """Return a section below a section below a section."""
    node: dict[str, Any] = {}
    for _ in range(depth):
        node = {"x": node}
    return node


ENDLESS: dict[str, Any] = {}
ENDLESS["data"] = ENDLESS  # as a YAML anchor can make it


@pytest.mark.parametrize(
    "document",
    [
        {"data": {"columns": {"prompt": "\ud800"}}},
        {"lora": {"target_modules": ["\ud800"]}},
        {"\ud800": 1},
        {"train": {"\ud800": 1}},
        {"runs": {"demo": {"\ud800": 1}}},
        {"runs": {"\ud800": {}}},
        {"model": {"source": "m" * 1000}},
        {"model": {"source": "owner/" + "m" * 1000}},
        {"data": {"train": "t" * 1000}},
        {"data": {"train": "\0"}},
        {"evaluate": {"tasks_dir": "t" * 5000}},
        {"train": {"seed": 10**5000}},
        {"train": {"seed": nested(3000)}},
        {"runs": {"demo": {"train": nested(3000)}}},
        ENDLESS,
        {"runs": {"demo": ENDLESS}},
    ],
    ids=range(16),
)
def test_document_that_once_ended_in_a_traceback_does_not(document):
    read_and_use(document)


@EDITED
@given(st.dictionaries(KEYS, JUNK, max_size=4))
def test_no_document_ends_in_a_traceback(document):
    read_and_use(document)


@EDITED
@given(st.dictionaries(st.sampled_from(["model", "data", "train", "runs", "x"]), JUNK, max_size=4))
def test_no_override_of_a_run_ends_in_a_traceback(override):
    read_and_use({"runs": {"demo": override}})


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("data", "seq_len"),
        ("train", "learning_rate"),
        ("train", "max_steps"),
        ("train", "micro_batch_size"),
        ("hardware", "gpus"),
        ("hardware", "gpu_memory_gib"),
    ],
)
def test_true_is_no_number(section, key, value):
    with pytest.raises(
        UserError, match=rf"{section}\.{key} = {as_yaml(value)}: must be a number, not true"
    ):
        load_config({section: {key: value}})


@pytest.mark.parametrize("value", [1, 0, 1.0, "yes", "true", "off"])
def test_number_or_text_is_not_true(value):
    with pytest.raises(UserError, match=r"data\.packing = .*: must be true or false"):
        load_config({"data": {"packing": value}})
