"""Peaks of recordings that are kept, or shipped with the models."""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.preflight_examples import setup
from workflow.lib.model.architecture.shipped_shapes import known_config, known_shape
from workflow.lib.planning.machine import imagined_machine
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.preflight.planning_inputs import plan_from_settings
from workflow.lib.planning.preflight.what_if import settings_of
from workflow.lib.recording import kept_tapes
from workflow.lib.recording.kept_tapes import folder, keep_peaks, known_peaks, shipped_key, stored
from workflow.lib.recording.recording_process import PlanRecorder
from workflow.lib.system.gpu_models import BY_NAME
from workflow.scripts.write_model_peaks import demo_peaks

PINS = Path(__file__).parents[2] / "envs" / "pins.txt"
PEAKS = Peaks({"forward": {"logits": 7}}, host_bytes=5)
CONFIG = {"model_type": "llama"}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_peaks_are_known_of_the_plan_that_they_were_kept_of_alone():
    keep_peaks(CONFIG, setup(), PEAKS, checked=True)
    assert known_peaks(CONFIG, setup(), checked=True) == PEAKS
    assert known_peaks(CONFIG, setup(), checked=False) is None
    assert known_peaks(CONFIG, setup(rank=8), checked=True) is None
    assert known_peaks(CONFIG | {"hidden_size": 8}, setup(), checked=True) is None


def test_builds_of_one_release_share_recordings(monkeypatch):
    def key(torch):
        monkeypatch.setattr(kept_tapes, "version", lambda _: torch)
        return kept_tapes.recording_key(CONFIG, setup(), checked=True)

    assert key("2.11.0+cu130") == key("2.11.0") != key("2.12.0")


def test_damaged_file_is_as_if_it_were_not_there():
    keep_peaks(CONFIG, setup(), PEAKS, checked=True)
    (file,) = folder().iterdir()
    file.write_text(json.dumps([1])[:-1])
    assert known_peaks(CONFIG, setup(), checked=True) is None


def test_shipped_key_is_another_for_every_value_that_is_no_default():
    plan = setup()
    others = [
        replace(plan, **x)
        for x in (
            {"rank": 8},
            {"activation_checkpointing": False},
            {"reshard_after_forward": False},
        )
    ]
    assert len({shipped_key(CONFIG, x) for x in (plan, *others)}) == 4


def test_shipped_peaks_are_what_the_engine_asks_for_today(process):
    """Otherwise run `python -m workflow.scripts.write_model_peaks`."""
    model = "Qwen/Qwen3-0.6B"
    config, shape = known_config(model), known_shape(model)
    run = settings_of([], seq_len=2048, rank=16, processes=1, batch=None)
    on = imagined_machine(1, BY_NAME["NVIDIA GeForce RTX 4090"])
    plan = replace(plan_from_settings(run, shape, on), accumulation_steps=16)
    asked = PlanRecorder(process, config, shape).recorded_plan(plan)
    shipped = known_peaks(config, asked, checked=True)
    (recorded,) = process.peaks(config, [asked])
    found, expected = stored(recorded), stored(shipped)
    assert found[:2] == expected[:2]  # memory; other versions have other small operations
    pinned = f"transformers=={version('transformers')}" in PINS.read_text(encoding="utf-8").split()
    assert found == expected or not pinned


def test_shipped_peaks_of_the_demo_are_those_of_today_and_all_that_it_needs(process, monkeypatch):
    """Otherwise run `python -m workflow.scripts.write_model_peaks`."""
    shipped = kept_tapes._shipped()
    monkeypatch.setattr(kept_tapes, "_shipped", dict)
    recorded = demo_peaks(process)
    # memory; other versions have other small operations
    assert {key: peaks[:2] for key, peaks in recorded.items()} == {
        key: shipped.get(key, ())[:2] for key in recorded
    }
