"""Steps of this machine beside what is predicted of them, by the tables and by a probe.

`python -m tests.support.probed_steps FOLDER` probes this machine, trains the cases and prints a
line for each; what was found is in FOLDER, which must be empty. Takes four minutes on one GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.recorded_work import step_seconds
from workflow.benchmark.cases import load_benchmark, requests
from workflow.benchmark.prediction import prepare
from workflow.lib.planning.probes import FOLDER
from workflow.lib.recording.recording_process import recording_process
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.artifact_files import read_lines
from workflow.lib.system.hardware import visible_gpus

ROOT = Path(__file__).resolve().parents[2]
LLAMA_8B = {"model": "meta-llama/Meta-Llama-3-8B", "layers": 8, "micro_batch_size": 2}
LLAMA_1B = {"model": "meta-llama/Llama-3.2-1B", "micro_batch_size": 2}
KEPT = {"activation_checkpointing": False}
ON_GPU: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "8b_graphs": (LLAMA_8B, {"train": KEPT}),
    "8b_python": (LLAMA_8B, {"train": KEPT, "hardware": {"cuda_graphs": False}}),
    "8b_dora_python": (LLAMA_8B, {"lora": {"use_dora": True}, "hardware": {"cuda_graphs": False}}),
    "8b_host_activations": (LLAMA_8B, {"train": KEPT, "hardware": {"offload_activations": True}}),
    "8b_host_layers": (LLAMA_8B, {"hardware": {"offload_layers": 4}}),
    "1b_graphs": (LLAMA_1B, {"train": KEPT}),
    "1b_python": (LLAMA_1B, {"train": KEPT, "hardware": {"cuda_graphs": False}}),
}
ON_CPU: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kept": ({}, {"train": KEPT}),
    "longer": ({"seq_len": 512}, {}),
}


def settings(on_gpu: bool) -> dict[str, Any]:
    """Write the list of cases; return the settings of the benchmark."""
    cases = ON_GPU if on_gpu else ON_CPU
    written = {
        name: {"benchmark": sizes, "settings": changes} for name, (sizes, changes) in cases.items()
    }
    Path("cases.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    sizes = (
        {"seq_len": 2048, "steps": 15}
        if on_gpu
        else {"model": str(ROOT / "workflow/resources/base")}
    )
    common = {"cases": list(cases), "cases_file": "cases.yaml", "check_bytes": False}
    return {"benchmark": sizes | common | {"processes": [1 if on_gpu else 2]}}


def command(*words: str) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", *words]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    gpus = visible_gpus()
    asked = settings(on_gpu=bool(gpus))
    Path("settings.yaml").write_text(yaml.safe_dump(asked), encoding="utf-8")
    command("workflow.scripts.probe", "--folder", "probe")
    command(
        "workflow.scripts.benchmark_run", "--configfile", "settings.yaml",
        "--output", "lines.jsonl", "--together", "9",
    )  # fmt: skip
    FOLDER.parent.mkdir(exist_ok=True)
    Path("probe").rename(FOLDER)
    lines = {line["case"]: line for line in read_lines(Path("lines.jsonl"))}
    with recording_process() as recordings:
        for request in requests(load_benchmark(asked), num_gpus=len(gpus)):
            again = prepare(request, num_gpus=len(gpus), recordings=recordings).predicted
            print(compared(request.name, lines[request.name], again), flush=True)


def compared(name: str, line: dict[str, Any], again: dict[str, Any] | None) -> str:
    """Return a line of text: measured, and both predictions with their parts above 1 ms."""
    if line["status"] != "measured" or again is None:
        return f"{name}: {line['status']} {line['cause']}"
    steps = line["measured"]["step_s"]
    seconds, words = step_seconds(steps), []
    for source, time in (("table", line["predicted"]["time"]), ("probe", again["time"])):
        parts = {part: round(1e3 * x) for part, x in time["parts_s"].items() if x > 0.001}
        words.append(
            f"{source} {1e3 * time['step_s']:.1f} ms {time['step_s'] / seconds - 1:+.1%} {parts}"
        )
    later = [1e3 * x for x in steps[len(steps) // 3 :]]
    by = "graphs" if StepPlan.of(line["plan"]).graphed else "Python"
    by = line["measured"]["graphs_off"] or by
    first = f"{name}: {1e3 * seconds:.1f} ms ({min(later):.1f} to {max(later):.1f}), by {by}"
    return "\n  ".join([first, *words])


if __name__ == "__main__":
    main()
