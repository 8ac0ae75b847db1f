"""What preflight decides for the presets, and the line in which each of them says so.

`python -m tests.support.preset_texts` writes all lines anew, in minutes."""

from pathlib import Path

import yaml

from workflow.lib.model.architecture.shipped_shapes import known_config, known_shape
from workflow.lib.planning.machine import imagined_machine
from workflow.lib.planning.preflight.decision import Decision, decide
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.recording.recording_process import (
    PlanRecorder,
    RecordingProcess,
    recording_process,
)
from workflow.lib.settings.config import RunConfig, load_config
from workflow.lib.step_plan.memory_options import OFFLOADED, in_words
from workflow.lib.system.gpu_models import BY_NAME
from workflow.lib.system.units import GIB

PRESETS = sorted((Path(__file__).resolve().parents[2] / "workflow" / "presets").glob("*.yaml"))
SAYS = "# Predicted for "

HOST_BYTES = 128 * GIB
DISK_BYTES = 2**42


# Each preset for GPUs is for these, as many as its `hardware.gpus`.
CARDS = {
    path.stem: "NVIDIA H100 80GB HBM3" if "80gb" in path.stem else "NVIDIA GeForce RTX 4090"
    for path in PRESETS
    if not path.stem.endswith("-demo")
}


def preset(name: str) -> Path:
    return PRESETS[0].with_name(f"{name}.yaml")


def only_run(name: str) -> RunConfig:
    """Return the settings of a preset's one run."""
    (run,) = load_config(yaml.safe_load(preset(name).read_text()))[1].values()
    return run


def decided(name: str, process: RecordingProcess) -> Decision:
    """Return what preflight decides for a million tokens of data, by recordings, without the
    package flash-attn."""
    run = only_run(name)
    config, shape = known_config(run.model.source), known_shape(run.model.source)
    gpus = imagined_machine(run.hardware.gpus, BY_NAME[CARDS[name]], host_bytes=HOST_BYTES)
    tokens = TokenCounts(
        seq_len=run.data.seq_len,
        vocab_size=shape.vocab_size,
        heldout_tokens=10**5,
        packed_rows=10**6 // run.data.seq_len,
        trained_tokens=10**6,
    )
    record = PlanRecorder(process, config, shape)
    return decide(PlannedRun(run, shape, gpus, tokens, record, disk_free_bytes=DISK_BYTES))


def promised(name: str, decision: Decision) -> str:
    """Return the line in which a preset says what it takes."""
    chosen, limits = decision.chosen, decision.limits
    needed = limits.capacity_bytes + chosen.lacking_bytes
    words = in_words(chosen.plan, known_shape(only_run(name).model.source).num_layers)
    on_host = words[OFFLOADED].replace(", ", " and ")
    offloaded = "" if on_host == "nothing" else f"{on_host} offloaded to host memory, "
    return (
        f"{SAYS}{only_run(name).hardware.gpus} x {CARDS[name]}, not run there: micro-batch "
        f"{chosen.micro_batch_size}, recomputation of {words['recomputation']}, "
        f"{offloaded}{needed / GIB:.1f} of {limits.capacity_bytes / GIB:.1f} GiB."
    )


def main() -> None:
    with recording_process() as process:
        for name in CARDS:
            line = promised(name, decided(name, process))
            text = preset(name).read_text(encoding="utf-8").splitlines()
            text = [line if old.startswith(SAYS) else old for old in text]
            preset(name).write_text("\n".join(text) + "\n", encoding="utf-8")
            print(f"{name}: {line}")


if __name__ == "__main__":
    main()
