"""The presets: they load, contain only what differs, and fit the GPUs that they name, by
preflight's own reckoning.

Their models are described among the shipped ones."""

import math
import re
from functools import cache

import pytest
import yaml

from tests.support.preset_texts import CARDS, PRESETS, decided, only_run, preset, promised
from tests.support.recordings import forked_recordings
from workflow.lib.artifacts.local_inputs import check_local_paths
from workflow.lib.model.architecture.shipped_shapes import known_shape
from workflow.lib.settings.config import Config, is_hub_id, load_config
from workflow.lib.settings.overrides import merge

# Recordings of these take as long as those of all others: `python -m tests.support.preset_texts`
# writes the lines of all.
LONG = ("gpt-oss-120b-4x24gb", "glm-4.5-air-4x24gb", "mixtral-8x7b-2x24gb")
RECORDED = [name for name in CARDS if name not in LONG]


@cache
def decisions():
    with forked_recordings() as process:
        return {name: decided(name, process) for name in RECORDED}


def changed(document, path=""):
    nested = [
        changed(value, f"{path}{key}.") if isinstance(value, dict) else [f"{path}{key}"]
        for key, value in document.items()
    ]
    return [key for below in nested for key in below]


def setting(document, path):
    """Return a setting; None of those without a default, as `rounds`."""
    value = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_names_only_what_differs_from_the_defaults(path):
    document = yaml.safe_load(path.read_text())
    defaults = Config().model_dump(mode="json")
    shared = {key: value for key, value in document.items() if key != "runs"}
    below = merge(defaults, shared)
    assert [key for key in changed(shared) if setting(shared, key) == setting(defaults, key)] == []
    for name, run in document.get("runs", {}).items():
        same = [key for key in changed(run) if setting(run, key) == setting(below, key)]
        assert same == [], f"{name} repeats defaults"


# The model of mixture-demo is made by the first of its commands (project/test_upcycle_base.py).
@pytest.mark.parametrize(
    "path", [p for p in PRESETS if p.stem != "mixture-demo"], ids=lambda path: path.stem
)
def test_local_paths_of_preset_exist(path):
    for name, run in load_config(yaml.safe_load(path.read_text()))[1].items():
        check_local_paths(name, run)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_command_in_the_preset_names_its_own_file(path):
    (named,) = re.findall(r"--configfile (\S+)", path.read_text())
    assert named == f"workflow/presets/{path.name}"


@pytest.mark.parametrize("name", RECORDED)
def test_preset_fits_the_gpus_that_it_names(name):
    assert decisions()[name].fits, decisions()[name].reason


@pytest.mark.parametrize("name", RECORDED)
def test_preset_says_what_preflight_says(name):
    line = promised(name, decisions()[name])
    lines = preset(name).read_text().splitlines()
    assert line in lines, f"run python -m tests.support.preset_texts: {name}.yaml should say {line}"


@pytest.mark.parametrize("name", CARDS)
def test_preset_asks_for_the_gpus_of_its_name_and_rows_that_its_model_has_positions_for(name):
    run = only_run(name)
    assert re.search(r"-(\d+)(?:x\d+gb|gpu)$", name)[1] == str(run.hardware.gpus)
    assert is_hub_id(run.model.source)
    assert run.data.seq_len <= known_shape(run.model.source).max_position_embeddings


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-8b-1x24gb", 8.03), ("llama2-70b-2x24gb", 68.98), ("llama3-70b-8gpu", 70.55),
     ("llama3-405b-8x80gb", 405.85)],
)  # fmt: skip
def test_model_has_as_many_parameters_as_published(name, billions):
    shape = known_shape(only_run(name).model.source)
    total = shape.quantized_weights + shape.plain_weights
    assert math.isclose(total / 1e9, billions, rel_tol=1e-3)


def test_demo_sweep_crosses_three_ranks_with_two_learning_rates():
    runs = load_config(yaml.safe_load(preset("sweep-demo").read_text()))[1].values()
    grid = {(run.lora.r, run.train.learning_rate) for run in runs}
    assert len(runs) == 6
    assert grid == {(r, rate) for r in (4, 16, 64) for rate in (2e-4, 1e-3)}
    assert {run.lora.alpha / run.lora.r for run in runs} == {2.0}
