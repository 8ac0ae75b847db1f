"""The stage from the command line, on tiny checkpoints and the CPU."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_stage import forked_stage, refusal_of
from tests.support.preflight_examples import PATHS, manifest, write_checkpoint
from workflow.lib.artifacts.preflight_record import Preflight
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.system.files import provenance, write_checked_json


class Stage:
    """A folder with a model and a tokens manifest, and the stage run on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_checkpoint(folder / "model")
        self.tokens = folder / "tokens" / "manifest.json"
        self.tokens.parent.mkdir()
        write_checked_json(self.tokens, manifest())
        self.output = folder / "run" / "preflight.json"
        self.log = folder / "logs" / "preflight.log"

    def run(self, *flags: str, **sections: Any) -> subprocess.CompletedProcess[str]:
        config = {
            "data": {"seq_len": 61},
            "hardware": {"gpus": 0, "cpu_processes": 3},
            "train": {"global_batch_size": 12},
        } | sections
        return forked_stage(
            "preflight_run", *flags, config=config, model=self.model, tokens=self.tokens,
            output=self.output, log=self.log, run="demo",
        )  # fmt: skip


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """The record of a run that fits, of rank 3, which keeps 4 checkpoints."""
    stage = Stage(tmp_path_factory.mktemp("fits"))
    done = stage.run(train={"global_batch_size": 12, "keep_checkpoints": 4}, lora={"r": 3})
    assert done.returncode == 0, done.stderr
    return read_record(stage.output, Preflight)


def test_run_that_fits_writes_the_document(predicted):
    assert predicted.verdict == "fits"


def test_disk_counts_checkpoints_one_more_than_are_kept(predicted):
    adapter = 4 * 3 * 3 * ((30 + 30) * 2 + (30 + 10) * 2 + (30 + 46) * 3)
    assert predicted.disk_bytes["checkpoints"] == 5 * 3 * adapter


def test_disk_counts_the_tokens_as_they_lie_there(predicted):
    assert predicted.disk_bytes["tokens"] == 37 * 61 * 9 + 307 * 5


def test_manifest_without_rows_is_refused(stage):
    empty = manifest()
    empty["splits"]["train"]["packed_rows"] = 0
    write_checked_json(stage.tokens, empty)
    said = refusal_of(stage.run(), output=stage.output)
    assert "no training row" in said
    assert "rejects.jsonl" in said


def sensitivities(path):
    """Costs of the model's linears; those of values are largest."""
    names = [f"model.layers.{n}.{linear}" for n in range(3) for linear in PATHS]
    costs = {name: 10.0 if "v_proj" in name else 1.0 for name in names}
    record = {"tokens": {"training": 9}, "nats": {"training": costs}, "model_files": {}}
    write_checked_json(path, record | {"device": "cpu", "provenance": provenance()})
    return path


GPU = {"gpus": 1, "gpu_model": "RTX 4090"}


def test_memory_that_is_left_keeps_linears_in_16_bits_by_their_sensitivities(stage):
    costs = sensitivities(stage.folder / "costs.json")
    done = stage.run("--sensitivities", str(costs), hardware=GPU, quantize={"keep": "auto"})
    assert done.returncode == 0, done.stderr
    record = read_record(stage.output, Preflight)
    assert record.plan.kept == (".+",), "a tiny model fits in 16 bits"
    assert record.bits.kept == record.bits.weights == 21
    assert record.bits.points[0].nats == pytest.approx(3 * 10 + 18)


def test_later_plans_follow_what_the_base_keeps(stage):
    base = stage.folder / "base"
    base.mkdir()
    facts = {"quantized_linears": 18, "quantized_parameters": 9, "total_bytes": 9}
    facts |= {"settings": {"keep": ["v_proj"]}, "method": "absmax", "device": "cpu"}
    write_checked_json(base / "quantization.json", facts | {"provenance": provenance()})
    done = stage.run("--base", str(base), hardware=GPU, quantize={"keep": "auto"})
    assert done.returncode == 0, done.stderr
    record = read_record(stage.output, Preflight)
    assert record.plan.kept == ("v_proj",)
    assert record.bits is None


def test_attention_that_is_told_is_that_of_processes_which_share_rows(stage):
    shared = {"gpus": 0, "cpu_processes": 3, "context_parallel": 3}
    done = stage.run(hardware=shared)
    assert done.returncode == 0, done.stderr
    assert read_record(stage.output, Preflight).plan.attention == "flex"
    assert "attention: flex (processes share rows, so they exchange heads)" in done.stderr
