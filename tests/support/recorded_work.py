"""Measured steps and the work that was recorded of them, kept in a file: recording takes seconds
for each.

`python -m tests.support.recorded_work` records what the file lacks, with `--anew` everything."""

import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

from tests.support.measurements import (
    FOLDER,
    MEASURED_SINCE,
    OTHER_CODE,
    all_lines,
    counts,
    described,
    recorded_plan,
    sizes_of,
)
from tests.support.preflight_examples import setup
from workflow.benchmark.cases import model_config
from workflow.lib.kernels.attention.attention_choice import FLEX
from workflow.lib.model.architecture.shipped_shapes import known_config, known_shape
from workflow.lib.planning.model_sizes import offload_window
from workflow.lib.planning.timing.machine_speed import fabric_of
from workflow.lib.planning.timing.rates import Rates, rates_of
from workflow.lib.planning.timing.step_time import Clock, Parts, Spread
from workflow.lib.planning.work import Work
from workflow.lib.recording import engine_run
from workflow.lib.recording.recording_process import as_recorded
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.files import json_sha256
from workflow.lib.system.gpu_models import BY_NAME, GpuModel, parse_gpus

FILE = FOLDER / "work.json.gz"
SINCE = "2026-11-24T23"  # the engine's kernels of experts, norms and matmuls in 8 bits
# Of other code: a recurrence by its family's, and heads of odd sizes in one matmul.
OTHERWISE = ("_family_code", "_slow_head")
# Since our operations compute their recurrences, and their norms of queries and keys copy nothing.
RECURRENT_SINCE = "2026-11-26T10:16:59"
# Since then a pass by the start's values does not wait for the GPU.
PAGE_LOCKED = "2026-11-30T03:52"
FEWEST_STEPS = 3  # a first one compiles, and a last one was launched ahead
# Of a line's sizes: what does not change a step.
NO_PART = {"steps", "profile", "check_bytes", "checkpoint_pairs", "device"}
LLAMA_2, LLAMA_3 = "meta-llama/Llama-2-70b-hf", "meta-llama/Llama-3.1-8B"
PUBLISHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fsdp_qlora, 2 x 4090": ("2x4090", LLAMA_2, {"micro_batch_size": 2, "offload_layers": 80}),
    "fsdp_qlora, 2 x 3090": ("2x3090", LLAMA_2, {"micro_batch_size": 2, "offload_layers": 80}),
    "fsdp_qlora, 4 x H100": ("4xH100", LLAMA_2, {"micro_batch_size": 8}),
    "fms-acceleration, 2 x A100": ("2xA100", LLAMA_2, {"seq_len": 4096}),
    "Accelerate + TRL, 2 x 3090": (
        "2x3090",
        "meta-llama/Llama-3.1-70B",
        {"seq_len": 1024, "dropout": 0.05, "offload_layers": 80},
    ),
    "torchtune, 1 x 4090": ("4090", LLAMA_3, {"micro_batch_size": 2}),
    "unsloth, 1 x H200": ("H200", LLAMA_3, {"micro_batch_size": 2}),
    "unsloth, 1 x H200, all activations kept": (
        "H200",
        LLAMA_3,
        {"micro_batch_size": 2, "activation_checkpointing": False},
    ),
}
"""GPUs, model and plan of published speeds, as far as they are known."""


@dataclass(frozen=True)
class Step:
    """A step of some GPUs, its recorded work, and what it took."""

    label: str
    model: str
    gpu: GpuModel
    plan: StepPlan
    work: Work
    num_layers: int
    trained_share: float
    measured_s: float = 0.0

    def parts(self, rates: Rates | None = None) -> Parts:
        """Return the predicted seconds of a micro-batch; rates: instead of the GPU's."""
        return self._clock(rates).parts(self.work, self.plan, **self._counts())

    def spread(self) -> Spread:
        """Return what a micro-batch may take on other hosts."""
        return self._clock(None).spread(self.work, self.plan, **self._counts())

    def _clock(self, rates: Rates | None) -> Clock:
        fabric = fabric_of(self.gpu, gpus_per_node=self.plan.processes)
        return Clock(self.gpu, fabric, rates or rates_of(self.gpu))

    def _counts(self) -> dict[str, Any]:
        return {
            "num_layers": self.num_layers,
            "trained_share": self.trained_share,
            "micro_batches": self.plan.accumulation_steps,
        }

    def error(self, rates: Rates | None = None) -> float:
        """Relative error of the predicted step; positive if it is too long."""
        seconds = sum(self.parts(rates).values()) * self.plan.accumulation_steps
        return seconds / self.measured_s - 1


def timed_lines() -> list[dict[str, Any]]:
    """Return measurements that say what the engine of today takes: the last one of each GPU, sizes
    and plan, since `SINCE` or of an engine that asks for as much memory as today's."""
    last = {}
    for line in sorted(all_lines(), key=_created):
        measured = line.get("measured") or {}
        if line.get("peer") or len(measured.get("step_s", ())) < FEWEST_STEPS:
            continue
        plan = line.get("setup") or line["plan"]
        waits = plan.get("start_reference") and _created(line) < PAGE_LOCKED
        if plan.get("products") != "int8" and not waits and (_is_new(line) or counts(line)):
            sizes = {name: x for name, x in line["sizes"].items() if name not in NO_PART}
            known = [line["gpu_names"], line["processes"], sizes, plan, line["plan"]]
            last[json_sha256([*known, line["measured"].get("attention")])] = line
    return [*last.values()]


def _is_new(line: dict[str, Any]) -> bool:
    """Whether a line is of code that takes as long as today's."""
    commits = MEASURED_SINCE.get(line["sizes"]["model"])
    since = [SINCE]
    if commits is not None:
        since.append(RECURRENT_SINCE if not commits else _first_of(frozenset(commits)))
    other = line["case"] in OTHER_CODE or line["case"].endswith(OTHERWISE)
    return not other and _created(line) >= max(since)


@cache
def _first_of(commits: frozenset[str]) -> str:
    """Return when the first line of some commits was measured."""
    return min(_created(line) for line in all_lines() if line["versions"]["commit"] in commits)


def _created(line: dict[str, Any]) -> str:
    return str(line["versions"].get("created_utc"))


def measured_steps() -> list[Step]:
    """Return the measurements whose work is kept."""
    kept = kept_work()
    return [
        Step(
            label=f"{line['case']}, {line['processes']} x {line['gpu_names'][0].split()[1]}, "
            f"{line['versions']['commit']}",
            model=line["sizes"]["model"],
            gpu=BY_NAME[line["gpu_names"][0]],
            plan=_plan(line),
            work=Work.of(kept[key]["work"]),
            num_layers=kept[key]["num_layers"],
            trained_share=1 - line["sizes"]["documents"] / line["sizes"]["seq_len"],
            measured_s=step_seconds(line["measured"]["step_s"]),
        )
        for line in timed_lines()
        if (key := _key(line)) in kept
    ]


def step_seconds(measured: list[float]) -> float:
    """Return the median of steps, without the first third and those after it that took over half
    more than the median of the rest: kernels and states were still made in them."""
    steps = measured[len(measured) // 3 :]
    while len(steps) > 1 and steps[0] > 1.5 * median(steps[1:]):
        steps = steps[1:]
    return median(steps)


def published_step(name: str) -> Step:
    """Return a step of `PUBLISHED`."""
    gpus, model, changes = PUBLISHED[name]
    count, gpu = parse_gpus(gpus, setting="--gpus")
    plan, kept = setup(processes=count, fused_layers=True, **changes), kept_work()[name]
    return Step(name, model, gpu, plan, Work.of(kept["work"]), kept["num_layers"], 1.0)


def _plan(line: dict[str, Any]) -> StepPlan:
    plan, measured = recorded_plan(line), line["measured"]
    if measured.get("attention") == FLEX:  # earlier setups call it flash
        plan = replace(plan, attention=FLEX)
    if measured.get("graphs_off"):
        plan = replace(plan, cuda_graphs=False)
    return replace(plan, documents_per_row=float(line["sizes"].get("documents", 1)))


def _key(line: dict[str, Any]) -> str:
    return json_sha256(line)[:16]


@cache
def kept_work() -> dict[str, dict[str, Any]]:
    """Return what is kept: the number of layers and the work, by key."""
    document = {}
    if FILE.is_file():
        document = json.loads(gzip.decompress(FILE.read_bytes()))
    return document


def recorded(key: str) -> dict[str, Any]:
    """Return what is kept of a measurement or a published speed, recorded. Takes seconds; this
    process has the recorded device from then on."""
    return next(record() for name, record in _recordings() if name == key)


def _recordings() -> Iterator[tuple[str, Any]]:
    for line in timed_lines()[::-1]:
        yield _key(line), lambda line=line: _of_line(line)
    for name, (gpus, model, changes) in PUBLISHED.items():
        count, _ = parse_gpus(gpus, setting="--gpus")
        plan = setup(processes=count, fused_layers=True, **changes)
        config, shape = known_config(model), known_shape(model)
        yield name, lambda config=config, shape=shape, plan=plan: _record(config, shape, plan)


def _of_line(line: dict[str, Any]) -> dict[str, Any]:
    config = model_config(sizes_of(line))
    return _record(config, described(json.dumps(config), line["sizes"]["model"]), _plan(line))


def _record(config: Any, shape: Any, plan: StepPlan) -> dict[str, Any]:
    plan = as_recorded(replace(plan, offload_window_bytes=offload_window(shape, plan)))
    work = engine_run.record(config, plan, checked=False).work
    return {"num_layers": shape.num_layers, "work": work.stored()}


def main() -> None:
    kept = {} if "--anew" in sys.argv else kept_work()
    recordings = dict(_recordings())
    found = {key: kept[key] for key in recordings.keys() & kept.keys()}
    for key in recordings.keys() - kept.keys():
        found[key] = recordings[key]()
        print(key, len(found), flush=True)
        _write(found)
    _write(found)


def _write(found: dict[str, Any]) -> None:
    text = json.dumps(dict(sorted(found.items())), separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
