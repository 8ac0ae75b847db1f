"""Write workflow/resources/models/peaks.json.gz anew, or add to it: recordings that answer
`preflight_run --gpus ... --model ... --estimate` with the default settings. Takes a minute for each
model and number of GPUs.

  python -m workflow.scripts.write_model_peaks [--models ...] [--gpus ...] [--add]
"""

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workflow.lib.model.architecture.shipped_shapes import known_config, known_shape
from workflow.lib.planning.machine import imagined_machine
from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.preflight.decision import decide
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.preflight.what_if import imagined_tokens, settings_of
from workflow.lib.recording.kept_tapes import SHIPPED, shipped_key, stored
from workflow.lib.recording.recording_process import PlanRecorder, plan_recorder
from workflow.lib.step_plan.plan import StepPlan
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


class Noting:
    """Passes on a recorder's results, and notes them."""

    def __init__(self, recorder: PlanRecorder, config: dict[str, Any]) -> None:
        self.noted: dict[str, list[Any]] = {}
        self._recorder, self._config = recorder, config

    def peaks(self, plans: Sequence[StepPlan]) -> list[Peaks]:
        made = self._recorder.peaks(plans)
        for plan, peaks in zip(plans, made, strict=True):
            self.noted[shipped_key(self._config, self._recorder.recorded_plan(plan))] = stored(
                peaks
            )
        return made

    def tape(self, plan: StepPlan) -> Tape:
        return self._recorder.tape(plan)


def noted(model: str, counts: Sequence[int]) -> dict[str, list[Any]]:
    """Return the peaks that default questions about a model need, by key."""
    config, shape = known_config(model), known_shape(model)
    assert config is not None, f"{model} is not shipped"
    assert shape is not None, f"{model} is not described"
    with plan_recorder(config, shape) as recorder:
        record = Noting(recorder, config)
        for count in counts:
            run = settings_of([], seq_len=2048, rank=16, processes=count, batch=None)
            tokens = imagined_tokens(shape, seq_len=2048, rows=10_000)
            for gib in CAPACITIES:
                on = imagined_machine(count, BY_NAME[CARD], host_bytes=count * 64 * GIB)
                on = replace(on, gpu_bytes=gib * GIB)
                decide(PlannedRun(run, shape, on, tokens, record, estimate=True))
    return record.noted


def main(args: argparse.Namespace) -> None:
    peaks = json.loads(gzip.decompress(SHIPPED.read_bytes())) if args.add else {}
    if not args.add:
        SHIPPED.unlink(missing_ok=True)  # else its recordings would count as current
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
