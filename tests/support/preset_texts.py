"""What preflight decides for the presets, and the line in which each of them says so.

`python -m tests.support.preset_texts` writes all lines anew, in minutes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.architecture.shipped_shapes import known_config, known_shape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.preflight.decision import Decision, decide
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.recording.recording_process import (
    PlanRecorder,
    RecordingProcess,
    recording_process,
)
from workflow.lib.settings.config import RunConfig, load_config
from workflow.lib.step_plan.memory_options import in_words
from workflow.lib.system.gpu_models import BY_NAME
from workflow.lib.system.units import GIB

PRESETS = sorted((Path(__file__).resolve().parents[2] / "workflow" / "presets").glob("*.yaml"))
SAYS = "# Predicted for "

HOST_BYTES = 128 * GIB
DISK_BYTES = 2**42


@dataclass(frozen=True)
class Promise:
    """The machine that a preset names, and its model by hub id."""

    model: str
    num_gpus: int
    card: str


PROMISES = {
    "llama3-8b-1x24gb": Promise(
        "meta-llama/Meta-Llama-3-8B-Instruct", 1, "NVIDIA GeForce RTX 4090"
    ),
    "llama2-70b-2x24gb": Promise("meta-llama/Llama-2-70b-chat-hf", 2, "NVIDIA GeForce RTX 4090"),
    "llama3-70b-8gpu": Promise(
        "meta-llama/Meta-Llama-3-70B-Instruct", 8, "NVIDIA GeForce RTX 4090"
    ),
    "llama3-405b-8x80gb": Promise("meta-llama/Llama-3.1-405B-Instruct", 8, "NVIDIA H100 80GB HBM3"),
    "qwen3-30b-a3b-1x24gb": Promise("Qwen/Qwen3-30B-A3B", 1, "NVIDIA GeForce RTX 4090"),
    "qwen3-30b-a3b-2x24gb": Promise("Qwen/Qwen3-30B-A3B", 2, "NVIDIA GeForce RTX 4090"),
    "gpt-oss-20b-1x16gb": Promise("openai/gpt-oss-20b", 1, "NVIDIA GeForce RTX 4090"),
    "gpt-oss-120b-4x24gb": Promise("openai/gpt-oss-120b", 4, "NVIDIA GeForce RTX 4090"),
    "glm-4.5-air-4x24gb": Promise("zai-org/GLM-4.5-Air", 4, "NVIDIA GeForce RTX 4090"),
    "mixtral-8x7b-2x24gb": Promise(
        "mistralai/Mixtral-8x7B-Instruct-v0.1", 2, "NVIDIA GeForce RTX 4090"
    ),
}


def preset(name: str) -> Path:
    return PRESETS[0].with_name(f"{name}.yaml")


def only_run(name: str) -> RunConfig:
    """Return the settings of a preset's one run."""
    (run,) = load_config(yaml.safe_load(preset(name).read_text()))[1].values()
    return run


def shape_of(model: str) -> ModelShape:
    known = known_shape(model)
    assert known is not None
    return known


def machine_of(promise: Promise) -> Machine:
    """Return the machine of a promise, without the flash-attn package: attention then takes more
    memory."""
    return Machine(
        device="cuda",
        processes=promise.num_gpus,
        gpu_names=(promise.card,) * promise.num_gpus,
        gpu_bytes=int(BY_NAME[promise.card].memory_gib * GIB),
        host_bytes=HOST_BYTES,
        flash_attention=False,
    )


def config_of(model: str) -> dict[str, Any]:
    """Return the config.json of a shipped model."""
    known = known_config(model)
    assert known is not None
    return known


def decided(promise: Promise, run: RunConfig, process: RecordingProcess) -> Decision:
    """Return what preflight decides for a million tokens of data, by recordings."""
    shape = shape_of(promise.model)
    tokens = TokenCounts(
        seq_len=run.data.seq_len,
        vocab_size=shape.vocab_size,
        heldout_tokens=10**5,
        packed_rows=10**6 // run.data.seq_len,
        trained_tokens=10**6,
    )
    record = PlanRecorder(process, config_of(promise.model), shape)
    return decide(
        run, shape, machine_of(promise), tokens, disk_free_bytes=DISK_BYTES, record=record
    )


def promised(name: str, decision: Decision) -> str:
    """Return the line in which a preset says what it takes."""
    promise, chosen, limits = PROMISES[name], decision.chosen, decision.limits
    needed = limits.capacity_bytes + chosen.lacking_bytes
    words = in_words(chosen.plan)
    on_host = words["on the host"].replace(", ", " and ")
    offloaded = "" if on_host == "nothing" else f"{on_host} on the host, "
    return (
        f"{SAYS}{promise.num_gpus} x {promise.card}, not run there: micro-batch "
        f"{chosen.micro_batch_size}, recomputation of {words['recomputation']}, "
        f"{offloaded}{needed / GIB:.1f} of {limits.capacity_bytes / GIB:.1f} GiB."
    )


def main() -> None:
    with recording_process() as process:
        for name, promise in PROMISES.items():
            line = promised(name, decided(promise, only_run(name), process))
            text = preset(name).read_text(encoding="utf-8").splitlines()
            text = [line if old.startswith(SAYS) else old for old in text]
            preset(name).write_text("\n".join(text) + "\n", encoding="utf-8")
            print(f"{name}: {line}")


if __name__ == "__main__":
    main()
