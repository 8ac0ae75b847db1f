"""Write workflow/resources/models/peaks.json.gz anew, or add to it: recordings that answer
`preflight_run --gpus ... --model ... --estimate` with the default settings, and the demo's
preflight on CPU processes. Takes a minute for each model and number of GPUs.

  python -m workflow.scripts.write_model_peaks [--models ...] [--gpus ...] [--add]
"""

import argparse
import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from workflow.lib.model.architecture.model_shape import ModelShape, described_config, read_shape
from workflow.lib.model.architecture.shipped_shapes import known_config, known_shape
from workflow.lib.planning.machine import asked_machine, imagined_machine
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.preflight.checks import read_tokens
from workflow.lib.planning.preflight.decision import decide
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.preflight.what_if import imagined_tokens, settings_of
from workflow.lib.recording.kept_tapes import SHIPPED, shipped_key, stored
from workflow.lib.recording.recording_process import (
    PlanRecorder,
    RecordingProcess,
    recording_process,
)
from workflow.lib.settings.config import load_config
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.environment import SOURCES
from workflow.lib.system.gpu_models import BY_NAME
from workflow.lib.system.units import GIB

MODELS = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-30B-A3B",
)
COUNTS = (1, 2)
CARD = "NVIDIA GeForce RTX 4090"
CAPACITIES = (8, 24, 80)  # GiB: plans that do not fit need other recordings than those that do


class Noting(PlanRecorder):
    """Notes the recordings that it is asked for."""

    def __init__(
        self, process: RecordingProcess, config: dict[str, Any], shape: ModelShape
    ) -> None:
        super().__init__(process, config, shape)
        self.noted: dict[str, list[Any]] = {}

    def recorded_peaks(self, plans: Sequence[StepPlan]) -> list[Peaks]:
        made = super().recorded_peaks(plans)
        for plan, peaks in zip(plans, made, strict=True):
            key = shipped_key(self._config, self.recorded_plan(plan))
            self.noted[key] = stored(peaks)
        return made


def noted(model: str, counts: Sequence[int]) -> dict[str, list[Any]]:
    """Return the peaks that default questions about a model need, by key."""
    config, shape = known_config(model), known_shape(model)
    assert config is not None, f"{model} is not shipped"
    assert shape is not None, f"{model} is not described"
    with recording_process() as process:
        record = Noting(process, config, shape)
        for count in counts:
            run = settings_of([], seq_len=2048, rank=16, processes=count, batch=None)
            tokens = imagined_tokens(shape, seq_len=2048, rows=10_000)
            for gib in CAPACITIES:
                on = imagined_machine(count, BY_NAME[CARD], host_bytes=count * 64 * GIB)
                on = replace(on, gpu_bytes=gib * GIB)
                decide(PlannedRun(run, shape, on, tokens, record, estimate=True))
    return record.noted


def demo_peaks(process: RecordingProcess) -> dict[str, list[Any]]:
    """Return the peaks that the demo's preflight needs on CPU processes with enough memory, by key.
    Its tokens are made for that."""
    settings = SOURCES / "config.yaml"
    with TemporaryDirectory() as folder:
        files = ["--snakefile", str(SOURCES / "Snakefile"), "--configfile", str(settings)]
        command = [sys.executable, "-m", "snakemake", *files, "--cores", "all", "tokenize"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        (model,) = Path(folder).glob("results/models/*/description.json")
        (manifest,) = Path(folder).glob("results/tokens/*/manifest.json")
        config, shape, tokens = described_config(model), read_shape(model), read_tokens(manifest)
    run = load_config(yaml.safe_load(settings.read_text(encoding="utf-8")))[1]["demo"]
    record = Noting(process, config, shape)
    machine = asked_machine("cpu", run.hardware.cpu_processes, nodes=1)
    decide(PlannedRun(run, shape, replace(machine, host_bytes=64 * GIB), tokens, record))
    return record.noted


def main(args: argparse.Namespace) -> None:
    peaks = json.loads(gzip.decompress(SHIPPED.read_bytes())) if args.add else {}
    if not args.add:
        SHIPPED.unlink(missing_ok=True)  # else its recordings would count as current
    with recording_process() as process:
        peaks |= demo_peaks(process)
    for model in args.models:
        peaks |= noted(model, args.gpus)
        text = json.dumps(dict(sorted(peaks.items())), separators=(",", ":"))
        SHIPPED.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", nargs="+", default=MODELS)
    arguments.add_argument("--gpus", nargs="+", type=int, default=COUNTS)
    arguments.add_argument("--add", action="store_true", help="keep what is there")
    main(arguments.parse_args())
