"""The presets: they load, contain only what differs, and fit the GPUs that they name, by
preflight's own reckoning.

Their models are described among the shipped ones.
"""

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.recordings import forked_recordings
from workflow.lib.artifacts.local_inputs import check_local_paths
from workflow.lib.benchmark.cases import model_config, requests, run_settings
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.architecture.shipped_shapes import known_config, known_shape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.preflight.decision import Decision, decide
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.recording.recording_process import PlanRecorder, RecordingProcess
from workflow.lib.settings.config import (
    Config,
    RunConfig,
    is_hub_id,
    load_benchmark,
    load_config,
    merge,
)
from workflow.lib.system.gpu_models import BY_NAME
from workflow.lib.system.units import GIB

PRESETS = sorted((Path(__file__).resolve().parents[3] / "workflow" / "presets").glob("*.yaml"))

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
    """Return the file of a preset."""
    return PRESETS[0].with_name(f"{name}.yaml")


def only_run(name: str) -> RunConfig:
    """Return the settings of a preset's one run."""
    (run,) = load_config(yaml.safe_load(preset(name).read_text()))[1].values()
    return run


def shape_of(model: str) -> ModelShape:
    """Return the shape of a shipped model."""
    known = known_shape(model)
    assert known is not None
    return known


def machine_of(promise: Promise) -> Machine:
    """Return the machine of a promise, without the flash-attn package: attention then takes more
    memory.
    """
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


def decided(promise: Promise, run: RunConfig, process: RecordingProcess | None = None) -> Decision:
    """Return what preflight decides for a million tokens of data, by recordings if there is a
    process for them.
    """
    shape = shape_of(promise.model)
    tokens = TokenCounts(
        seq_len=run.data.seq_len,
        vocab_size=shape.vocab_size,
        heldout_tokens=10**5,
        packed_rows=10**6 // run.data.seq_len,
        trained_tokens=10**6,
    )
    record = PlanRecorder(process, config_of(promise.model), shape) if process else None
    return decide(
        run, shape, machine_of(promise), tokens, disk_free_bytes=DISK_BYTES, record=record
    )


@cache
def decisions() -> dict[str, Decision]:
    """Return what preflight decides for each preset."""
    with forked_recordings() as process:
        return {name: decided(PROMISES[name], only_run(name), process) for name in PROMISES}


def decision(name: str) -> Decision:
    """Return what preflight decides for a preset."""
    return decisions()[name]


def promised(name: str) -> str:
    """Return the line in which a preset says what it takes."""
    promise, chosen = PROMISES[name], decision(name).chosen
    limits = decision(name).limits
    needed = limits.capacity_bytes + chosen.lacking_bytes
    setup = chosen.setup
    some = "" if setup.offload_activations is True else f" of {setup.offload_activations} layers"
    away = [f"activations{some}"] * bool(setup.offload_activations)
    away += [f"{setup.offload_layers} layers"] if setup.offload_layers else []
    offloaded = f"{' and '.join(away)} on the host, " if away else ""
    return (
        f"# Predicted for {promise.num_gpus} x {promise.card}, not run there: "
        f"micro-batch {chosen.micro_batch_size}, recomputation of {chosen.recomputation}, "
        f"{offloaded}{needed / GIB:.1f} of "
        f"{limits.capacity_bytes / GIB:.1f} GiB."
    )


def changed(document: dict[str, Any], path: str = "") -> list[str]:
    """Return the paths of all settings of a document."""
    nested = [
        changed(value, f"{path}{key}.") if isinstance(value, dict) else [f"{path}{key}"]
        for key, value in document.items()
    ]
    return [key for below in nested for key in below]


def setting(document: dict[str, Any], path: str) -> Any:
    """Return the value at a path."""
    value: Any = document
    for key in path.split("."):
        value = value[key]
    return value


def test_every_preset_for_gpus_has_a_promise_here() -> None:
    training = {path.stem for path in PRESETS if not path.stem.startswith("benchmark-")}
    assert training == {*PROMISES, "sweep-demo", "mixture-demo"}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_names_only_what_differs_from_the_defaults(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    defaults = Config().model_dump(mode="json")
    shared = {key: value for key, value in document.items() if key != "runs"}
    below = merge(defaults, shared)
    assert [key for key in changed(shared) if setting(shared, key) == setting(defaults, key)] == []
    for name, run in document.get("runs", {}).items():
        same = [key for key in changed(run) if setting(run, key) == setting(below, key)]
        assert same == [], f"{name} repeats defaults"


# The model of mixture-demo is made by the first of its commands (project/test_upcycle_base.py).
@pytest.mark.parametrize(
    "path", [p for p in PRESETS if p.stem != "mixture-demo"], ids=lambda path: path.stem
)
def test_local_paths_of_preset_exist(path: Path) -> None:
    for name, run in load_config(yaml.safe_load(path.read_text()))[1].items():
        check_local_paths(name, run)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_command_in_the_preset_names_its_own_file(path: Path) -> None:
    (named,) = re.findall(r"--configfile (\S+)", path.read_text())
    assert named == f"workflow/presets/{path.name}"


@pytest.mark.parametrize("name", [p.stem for p in PRESETS if p.stem.startswith("benchmark-")])
def test_every_case_of_a_benchmark_preset_is_a_run_that_could_be(name: str) -> None:
    benchmark = load_benchmark(yaml.safe_load(preset(name).read_text()))
    found = requests(benchmark, num_gpus=0)
    assert found
    for request in found:
        assert model_config(request.sizes)["max_position_embeddings"] >= request.sizes.seq_len
        if request.settings.get("hardware", {}).get("shard_size") != 1:  # what `ddp` asks for
            run_settings(request, device="cpu")


@pytest.mark.parametrize("name", PROMISES)
def test_preset_fits_the_gpus_that_it_names(name: str) -> None:
    assert decision(name).fits, decision(name).reason


@pytest.mark.parametrize("name", PROMISES)
def test_preset_says_what_preflight_says(name: str) -> None:
    lines = preset(name).read_text().splitlines()
    assert promised(name) in lines, f"{name}.yaml should say: {promised(name)}"


@pytest.mark.parametrize("name", PROMISES)
def test_preset_asks_for_the_gpus_that_it_names(name: str) -> None:
    assert only_run(name).hardware.gpus == PROMISES[name].num_gpus
    assert only_run(name).model.source == PROMISES[name].model
    assert is_hub_id(PROMISES[name].model)


@pytest.mark.parametrize("name", PROMISES)
def test_rows_of_preset_fit_the_model_positions(name: str) -> None:
    most = shape_of(PROMISES[name].model).max_position_embeddings
    assert only_run(name).data.seq_len <= most


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-8b-1x24gb", 8.03), ("llama2-70b-2x24gb", 68.98), ("llama3-70b-8gpu", 70.55),
     ("llama3-405b-8x80gb", 405.85)],
)  # fmt: skip
def test_model_has_as_many_parameters_as_published(name: str, billions: float) -> None:
    shape = shape_of(PROMISES[name].model)
    total = shape.quantized_weights + shape.plain_weights
    assert math.isclose(total / 1e9, billions, rel_tol=1e-3)


def test_70b_on_two_small_gpus_fits_because_what_waits_leaves_for_the_host() -> None:
    """What its preset says."""
    promise = PROMISES["llama2-70b-2x24gb"]
    stay = {"offload_activations": False, "offload_layers": 0}
    run = RunConfig.model_validate({"hardware": stay, "data": {"seq_len": 2048}})
    assert not decided(promise, run).fits


def test_demo_sweep_crosses_three_ranks_with_two_learning_rates() -> None:
    runs = load_config(yaml.safe_load(preset("sweep-demo").read_text()))[1].values()
    grid = {(run.lora.r, run.train.learning_rate) for run in runs}
    assert len(runs) == 6
    assert grid == {(r, rate) for r in (4, 16, 64) for rate in (2e-4, 1e-3)}
    assert {run.lora.alpha / run.lora.r for run in runs} == {2.0}
