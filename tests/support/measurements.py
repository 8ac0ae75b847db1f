"""What was measured on GPUs (`tests/gpu/measurements`) beside what is predicted for it, as rows and
as a table.

`python -m tests.support.measurements` writes the table of memory anew into
workflow/docs/predictions.md, in minutes."""

import gzip
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.pages import DOCS, with_part
from workflow.benchmark.cases import BenchmarkConfig, model_config
from workflow.lib.kernels.attention.attention_choice import FLASH, FLEX
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.memory.replay import Replay, replay
from workflow.lib.planning.model_sizes import offload_window
from workflow.lib.recording.recording_process import RecordingProcess, recording_process
from workflow.lib.step_plan.base_plan import SUPERVISED
from workflow.lib.step_plan.plan import StepPlan

FOLDER = Path(__file__).parents[1] / "gpu" / "measurements"
PAGE = DOCS / "predictions.md"
# Of one process these commits do what the engine of today does: adapters are cast once a step,
# dropout and DoRA computed by nodes. Of norms that multiply by 1 + w, mixtures and matmuls in 8
# bits these, whose kernels are those of today.
LATEST = {
    "7ba77b7",
    "f30dae5",
    "fcbef42",
    "190b112",
    "9ed730d",
    "ae05c00",
    "1421c0a",
    "87a5bc9",
    "83d0a13",
    "bbd690b",
    "505011a",
    "a6d0370",
    "c21041c",
    "ba0ed26",
}
ONE_PROCESS = LATEST | {"2986d7a", "ebf624b", "0d0e7fd", "0223b86", "e477513", "fe03f01"}
# Of several these: each gathers packed weights into one buffer, and adapters in the compute dtype.
SEVERAL_PROCESSES = {"c4c4967", "3a56d7c", "5541524", "83d0a13", "bbd690b", "505011a", "a6d0370"}
# Stacks of experts are decoded by slices of 512 MiB.
MIXTURES = {"a348f07", "5d4797b", "98fd0ae", "c21041c", "ba0ed26"}
NO_LONGER_OFFERED = {("products", "int8"), ("saved_activations", "float8")}
WIDE_HEADS = {"10ff93b"}  # by kernels
FLASH_ALONE = {"a4e909a", "a6d0370"}  # short documents by FlashAttention
ALL_BY_GRAPHS = {"a6d0370", "c21041c", "ba0ed26"}
GEMMA_NORMS = {"f30dae5", "ae05c00", "1421c0a", "98fd0ae"} | WIDE_HEADS
# They ran without graphs, in processes that had captured some: cuBLAS' workspaces of captures, 64
# MiB, were still there, and all five are that much above their recordings.
BEHIND_GRAPHS = {
    "8b_sdpa_packed",
    "8b_dora",
    "8b_offloaded_layers",
    "8b_offloaded_layers_half",
    "70b_offloaded_layers_half",
}
# Other code than is recorded here: sdpa had no masks, which rows of several documents have, so keys
# and values were not repeated for each head. `70b_offloaded` took 2.5% more, before the
# gradient of the first layer's input was left out.
OTHER_CODE = {"nemotron", "seed_oss", "70b_offloaded"}
# Models of which more is fused than earlier commits fused, or whose recurrence other code computed:
# by which they were measured since.
MEASURED_SINCE = {
    "google/gemma-4-31B": WIDE_HEADS,
    "google/gemma-4-26B-A4B": WIDE_HEADS,
    "google/gemma-3-12b-pt": {"98fd0ae"},  # chunks of 256 rows in the loss
    # Their norms of queries and keys copied what they read.
    "tencent/Hunyuan-7B-Instruct": set[str](),
    "LGAI-EXAONE/EXAONE-4.0-32B": set[str](),
    # Its one linear for queries, keys and values kept no value of its own.
    "microsoft/Phi-4-mini-instruct": set[str](),
    # Transformers 5.17, by which these two were measured, gives keys for each value head, 5.23 does
    # not: recorded with 5.17 they are exact.
    "Qwen/Qwen3.5-27B": set[str](),
    "Qwen/Qwen3.5-35B-A3B": set[str](),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": set[str](),
    "allenai/Olmo-Hybrid-7B": {"92c137d"},
    "tiiuae/Falcon-H1-0.5B-Base": {"92c137d"},
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": {"98fd0ae"},
    "LiquidAI/LFM2-1.2B": {"e40b2ee"},
}


@dataclass(frozen=True)
class Row:
    """A measurement of our engine, and its recording replayed; bytes."""

    case: str
    processes: int
    plan: StepPlan
    shape: ModelShape
    allocated_bytes: int
    reserved_bytes: int
    replayed: Replay

    @property
    def allocated_error(self) -> float:
        """Share by which the replay is above what was measured."""
        return self.replayed.peaks.allocated_bytes / self.allocated_bytes - 1

    @property
    def reserved_error(self) -> float:
        return self.replayed.reserved_bytes / self.reserved_bytes - 1


def rows() -> list[Row]:
    """Return all measurements of our engine's memory that say what the engine of today does. Takes
    minutes: each is recorded."""
    with recording_process() as process:
        return [row(line, process) for line in all_lines() if counts(line)]


def all_lines() -> list[dict[str, Any]]:
    files = sorted(path.relative_to(FOLDER) for path in FOLDER.rglob("*.jsonl.gz"))
    lines = [line for file in files for line in measured_lines(str(file).removesuffix(".gz"))]
    return [line for line in lines if not NO_LONGER_OFFERED & {*_train(line).items()}]


def _train(line: dict[str, Any]) -> dict[str, Any]:
    """Return what a line says of these settings; earlier lines say it in `setup` alone."""
    of_settings = (line.get("settings") or {}).get("train") or {}
    both = (line.get("setup") or {}) | of_settings
    return {key: both.get(key) for key, _ in NO_LONGER_OFFERED}


def measured_lines(name: str) -> list[dict[str, Any]]:
    """Return the lines of a file of measurements, which lies compressed."""
    with gzip.open(FOLDER / f"{name}.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def sizes_of(line: dict[str, Any]) -> BenchmarkConfig:
    """Return the sizes of a line; earlier benchmarks had some more."""
    known = BenchmarkConfig.model_fields.keys()
    return BenchmarkConfig(**{key: line["sizes"][key] for key in line["sizes"].keys() & known})


def recorded_plan(line: dict[str, Any]) -> StepPlan:
    """Return the plan of a line. Earlier lines have a part of it in `setup`."""
    plan = line["plan"]
    setup = dict(line.get("setup") or plan)
    for old, new in (("products", "matmul_dtype"), ("products_in", "matmul_passes")):
        if old in setup:
            setup[new] = setup.pop(old)
    setup.pop("saved_activations", None)  # an option of earlier plans
    if setup.get("objective") == "next_token":  # its name before there were others
        setup["objective"] = SUPERVISED
    if "setup" not in line:
        return _as_then(StepPlan.of(setup), line)
    for name in ("fixed", "accumulates", "compute_bytes"):
        setup.pop(name, None)
    fields = {
        "device": plan["device"],
        "dropout": 0.05 if setup["dropout"] else 0.0,  # whether any was said
        "accumulation_steps": plan["accumulation_steps"],
        "compute_dtype": plan["compute_dtype"],
        "cuda_graphs": plan.get("cuda_graphs", False),
    }
    return _as_then(StepPlan.of(setup | fields), line)


def _as_then(plan: StepPlan, line: dict[str, Any]) -> StepPlan:
    """Return the plan with the attention of then, and without CUDA graphs where there were none."""
    commit = line["versions"]["commit"]
    packed = plan.documents_per_row > 1 and not plan.shares_prompts
    if packed and commit in FLASH_ALONE:
        plan = replace(plan, attention=FLASH)
    whole = plan.trains_head or plan.trains_embedding
    by_python = plan.offload_layers > 0 or plan.dora or whole
    by_graphs = plan.cuda_graphs and (commit in ALL_BY_GRAPHS or not by_python)
    return replace(plan, cuda_graphs=by_graphs)


@cache
def described(config: str, name: str) -> ModelShape:
    """Return the description of a config.json, made once."""
    return describe_config(json.loads(config), origin=Path(name))


def counts(line: dict[str, Any]) -> bool:
    """Whether a line has measured the memory of an engine that asks for what today's does."""
    if line.get("setup") is None or not (line.get("measured") or {}).get("allocated_bytes"):
        return False
    commit, asked = line["versions"]["commit"], line["setup"]
    if line["case"] in OTHER_CODE:
        return False
    if _is_gemma(line) and commit not in GEMMA_NORMS:
        return False
    config = model_config(sizes_of(line))
    if (commits := MEASURED_SINCE.get(line["sizes"]["model"])) is not None:
        return commit in commits
    if any("experts" in name for name in config):
        return commit in MIXTURES
    if asked["processes"] > 1:
        return commit in SEVERAL_PROCESSES and line["case"] not in BEHIND_GRAPHS
    return commit in (LATEST if asked.get("products") == "float8" else ONE_PROCESS)


def _is_gemma(line: dict[str, Any]) -> bool:
    config = model_config(sizes_of(line))
    return str(config["model_type"]).startswith("gemma")


def row(line: dict[str, Any], process: RecordingProcess) -> Row:
    plan = recorded_plan(line)
    if line["measured"]["attention"] == FLEX:  # earlier setups call it flash
        plan = replace(plan, attention=FLEX)
    sizes = sizes_of(line)
    config = model_config(sizes)
    shape = described(json.dumps(config), sizes.model)
    followed = replace(plan, offload_window_bytes=offload_window(shape, plan))
    return Row(
        line["case"], line["processes"], plan, shape,
        line["measured"]["allocated_bytes"], line["measured"]["reserved_bytes"],
        replay(process.record(config, followed, checked=sizes.check_bytes)),
    )  # fmt: skip


def table(found: list[Row]) -> str:
    """Return the comparison in Markdown, a line for each kind of model and number of GPUs."""
    lines = [
        "| models | GPUs | measurements | allocated: median, worst | reserved: median, worst |",
        "|---|---|---|---|---|",
    ]
    kinds = sorted({(_kind(row), row.processes) for row in found})
    for kind, processes in kinds:
        alike = [x for x in found if (_kind(x), x.processes) == (kind, processes)]
        errors = ([x.allocated_error for x in alike], [x.reserved_error for x in alike])
        cells = [f"{median(map(abs, e)):.2%}, {max(e, key=abs):+.1%}" for e in errors]
        lines.append(f"| {kind} | {processes} | {len(alike)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _kind(row: Row) -> str:
    kinds = row.shape.kinds
    if any(kind.recurrent for kind in kinds):
        return "with recurrent layers"
    return "mixtures" if any(kind.top_k for kind in kinds) else "dense"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_part(page, "measured", table(rows())), encoding="utf-8")
