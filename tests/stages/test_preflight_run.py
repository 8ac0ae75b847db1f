"""The stage from the command line, on tiny checkpoints and the CPU."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_stage import forked_stage
from tests.support.preflight_examples import manifest, write_checkpoint
from workflow.lib.system.files import read_checked_json, write_checked_json

DOCUMENT_KEYS = {
    "verdict",
    "reason",
    "plan",
    "terms",
    "phases",
    "peak_bytes",
    "peak_phase",
    "reserved_bytes",
    "method",
    "allocator_slack_bytes",
    "outside_allocator_bytes",
    "capacity_bytes",
    "margin_bytes",
    "host_bytes",
    "host_capacity_bytes",
    "disk_bytes",
    "disk_free_bytes",
    "time",
    "evaluation",
    "candidates",
    "model",
    "provenance",
}


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
        options = {
            "--config": json.dumps(config), "--model": self.model, "--tokens": self.tokens,
            "--output": self.output, "--log": self.log, "--run": "demo",
        }  # fmt: skip
        words = [str(word) for option in options.items() for word in option]
        return forked_stage("preflight_run", *words, *flags)

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = read_checked_json(self.output)
        return document


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def refused(stage: Stage, *parts: str, **sections: Any) -> None:
    """Assert exit status 1, one message with all parts, no traceback, and no output."""
    done = stage.run(**sections)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr
    assert not stage.output.exists()


def test_run_that_fits_writes_the_document(stage: Stage) -> None:
    assert stage.run().returncode == 0
    assert set(stage.document()) == DOCUMENT_KEYS
    assert stage.document()["verdict"] == "fits"


def test_evaluation_of_every_measured_subject_is_predicted(stage: Stage) -> None:
    """Tasks too: 704 questions with a choice each."""
    assert stage.run(evaluate={"subjects": ["original", "tuned"]}).returncode == 0
    evaluation = stage.document()["evaluation"]
    assert list(evaluation["subjects_s"]) == ["original", "tuned"]
    assert evaluation["total_s"] == pytest.approx(sum(evaluation["subjects_s"].values()))
    assert evaluation["read_tokens"] > 25_000
    assert "evaluation" in stage.log.read_text()


def test_plan_is_what_finetune_reads(stage: Stage) -> None:
    stage.run()
    plan = stage.document()["plan"]
    assert plan == plan | {
        "device": "cpu",
        "processes": 3,
        "nodes": 1,
        "replicas": 1,
        "micro_batch_size": 4,
        "accumulation_steps": 1,
        "activation_checkpointing": False,
        "reshard_after_forward": True,
        "offload_activations": False,
        "offload_window_bytes": None,
        "offload_embedding": False,
        "offload_layers": 0,
        "cuda_graphs": False,
        "gpu_memory_bytes": None,
        "compute_dtype": "float32",
        "num_steps": 10,  # 37 rows, 3 epochs, 12 a step
    }


def test_table_is_on_the_terminal_and_in_the_log(stage: Stage) -> None:
    shown = stage.run().stderr
    for text in (shown, stage.log.read_text()):
        assert "run demo: memory of each process" in text
        assert "nf4_weights" in text
        assert "micro-batch 4 x accumulation 1, 10 steps" in text


def test_run_that_does_not_fit_exits_1_with_the_table_in_the_log(stage: Stage) -> None:
    limits = {"gpus": 0, "cpu_processes": 3, "host_memory_gib": 1.6}
    done = stage.run(hardware=limits)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert stage.document()["verdict"] == "does_not_fit"
    log = stage.log.read_text()
    assert "saved_activations" in log
    # the layer that 5 of 8 spare is gone when memory peaks, in the backward of the first
    assert "run demo does not fit: micro-batch 1 (recomputation: 5 of 8 layers) needs" in log
    assert "Any one of these would fit: hardware.cpu_processes = 2 (peak" in log


def test_brief_keeps_the_table_of_a_run_that_fits_to_the_log(stage: Stage) -> None:
    done = stage.run("--brief")
    assert "nf4_weights" not in done.stderr
    assert "nf4_weights" in stage.log.read_text()


def test_brief_still_shows_the_table_of_a_run_that_does_not_fit(stage: Stage) -> None:
    done = stage.run("--brief", hardware={"gpus": 0, "host_memory_gib": 0.1})
    assert done.returncode == 1
    assert "nf4_weights" in done.stderr


def test_weights_are_never_read(stage: Stage) -> None:
    path = stage.model / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start:] = b"\xff" * (len(data) - start)  # NaN everywhere
    path.write_bytes(data)
    assert stage.run().returncode == 0


def test_document_is_the_same_twice_but_for_the_machine(stage: Stage) -> None:
    stage.run()
    first = stage.document()
    stage.run()
    second = stage.document()
    varying = {"provenance", "disk_free_bytes", "host_capacity_bytes", "capacity_bytes", "reason"}
    assert {k: first[k] for k in DOCUMENT_KEYS - varying} == {
        k: second[k] for k in DOCUMENT_KEYS - varying
    }


def test_disk_counts_checkpoints_one_more_than_are_kept(stage: Stage) -> None:
    stage.run(train={"global_batch_size": 12, "keep_checkpoints": 4}, lora={"r": 3})
    adapter = 4 * 3 * 3 * ((30 + 30) * 2 + (30 + 10) * 2 + (30 + 46) * 3)
    assert stage.document()["disk_bytes"]["checkpoints"] == 5 * 3 * adapter


def test_disk_counts_the_tokens_as_they_lie_there(stage: Stage) -> None:
    stage.run()
    assert stage.document()["disk_bytes"]["tokens"] == 37 * 61 * 9 + 307 * 5


def test_manifest_without_rows_is_refused(stage: Stage) -> None:
    empty = manifest()
    empty["splits"]["train"]["packed_rows"] = 0
    write_checked_json(stage.tokens, empty)
    refused(stage, "no training row", "rejects.jsonl")
