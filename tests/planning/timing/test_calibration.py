"""The time model against every timing that there is, and constants fitted to a machine's own
measurements."""

import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.measurements import described, measured_lines, sizes_of
from tests.support.preflight_examples import cpu_machine, llama_70b, machine, setup
from workflow.lib.benchmark.cases import model_config
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.timing.calibration import (
    Timing,
    fit,
    read_timings,
    serves,
    timing_of,
)
from workflow.lib.planning.timing.gpu_traffic import fabric_of, micro_batch_traffic
from workflow.lib.planning.timing.machine_speed import speed_of
from workflow.lib.planning.timing.step_time import H200, Constants, gpu_seconds
from workflow.lib.planning.timing.step_work import micro_batch_work
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import UserError
from workflow.lib.system.gpu_models import BY_NAME

GPU = BY_NAME["NVIDIA H200"]
# What the shipped constants are fitted to; timings of a later engine need another fit, so they are
# named here with it.
FITTED = (
    "llama2-70b-wide_2xh200_2026-11-22.jsonl", "llama2-70b-wide-again_2xh200_2026-11-22.jsonl",
    "llama-70b_2xh200-capped_2026-11-22.jsonl", "llama2-70b-wide_1xh200_2026-11-22.jsonl",
    "llama3-8b_1xh200_2026-11-22.jsonl", "memory_2xh200_2026-11-22.jsonl",
)  # fmt: skip
# What their layers took to be gathered, which FSDP2 copied into a buffer and out of another.
BY_FSDP2 = replace(H200, gather_traffic=10.9)
# Of later engines, which launch by graphs; nothing is fitted to these.
BY_GRAPHS = "recorded/cuda-graphs_1xh200_2026-11-24.jsonl"
# 2, 4 and 8 GPUs of one host; nothing is fitted to these.
MORE_GPUS = "weak-scaling_2-4-8xh200_2026-11-22.jsonl"
# Left out: activations on the host when bytes that two nodes saved still travelled twice, and a
# step that Python decided, whose launches have become fewer.
OTHERWISE_NOW = {("offloaded", "e6a3b18"), ("offloaded_half", "e6a3b18"), ("flash", "e854bc4", 1)}
WORST, MEDIAN = 0.10, 0.03
SURELY = 1.3  # as long as Python launches the GPU must compute: elsewhere Python decides, unevenly
MORE_SURELY = 2.2


def timing(
    label: str, shape: ModelShape, chosen: StepPlan, *, step_s: float, micro_batches: int = 1
) -> Timing:
    fabric = fabric_of(GPU, gpus_per_node=chosen.processes)
    return Timing(
        label=label,
        work=micro_batch_work(shape, chosen, trained_share=1.0, micro_batches=micro_batches),
        traffic=micro_batch_traffic(shape, chosen, fabric),
        micro_batches=micro_batches,
        step_s=step_s,
    )


def pausing(timing: Timing) -> Timing:
    """Return a timing of an engine whose GPU waited for the host before every micro-batch."""
    return replace(timing, work=replace(timing.work, pauses=1.0))


def timings(*names: str) -> list[Timing]:
    """Those of `tests/gpu/measurements` of fused layers.

    Without dropout, which was PEFT's own forward, and DoRA, whose norms were made in every pass."""
    rows = [row for name in names for row in measured_lines(name)]
    rows = [
        row for row in rows if row.get("setup") and not OTHERWISE_NOW & {_of(row)[:2], _of(row)}
    ]
    whole = [row | {"status": "measured", "shape": shape_of(row).document()} for row in rows]
    return [
        timing_of(row, GPU)
        for row in whole
        if serves(row, GPU.name)
        and (row["setup"]["fused_layers"] or row["case"] == "not_fused")
        and not row["setup"]["dropout"]
        and not row["setup"].get("dora")
    ]


def _of(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["case"], row["versions"]["commit"], row["processes"]


def shape_of(row: dict[str, Any]) -> ModelShape:
    config = model_config(sizes_of(row))
    return described(json.dumps(config), row["sizes"]["model"])


TIMINGS = timings(*FITTED)
DECIDED_BY_GPU = [each for each in TIMINGS if each.gpu_bound(GPU, BY_FSDP2) >= SURELY]


def errors(timings: list[Timing], constants: Constants) -> list[float]:
    return [abs(found.error(GPU, constants)) for found in timings]


@pytest.mark.parametrize("measured", DECIDED_BY_GPU, ids=lambda found: found.label)
def test_step_takes_what_it_took_on_h200(measured):
    assert measured.error(GPU, BY_FSDP2) == pytest.approx(0, abs=WORST)


@pytest.mark.parametrize(
    "measured",
    [e for e in timings(MORE_GPUS) if e.gpu_bound(GPU, BY_FSDP2) >= MORE_SURELY],
    ids=lambda found: found.label,
)
def test_step_of_more_gpus_takes_what_those_of_two_foretell(measured):
    """Also with activations on the one host that they share. Not where Python has its say (4 GPUs,
    one row each: 17 to 75% longer)."""
    assert measured.error(GPU, BY_FSDP2) == pytest.approx(0, abs=WORST)


@pytest.mark.parametrize(
    ("label", "largest_error"),
    [("graphs_1b", 0.03), ("graphs_1b_kept", 0.03), ("graphs", 0.04), ("graphs_kept", 0.03)],
)
def test_steps_by_graphs_take_what_launched_ones_foretell(label, largest_error):
    """Also of a small model, with the pause between steps that there was by graphs then."""
    (found,) = [x for x in timings(BY_GRAPHS) if x.label == f"{label} x 1"]
    assert abs(pausing(found).error(GPU, H200)) < largest_error
    assert found.error(GPU, H200) < pausing(found).error(GPU, H200)


def test_median_error_is_small():
    assert len(TIMINGS) >= 20
    assert len(DECIDED_BY_GPU) >= 15
    assert statistics.median(errors(TIMINGS, BY_FSDP2)) <= MEDIAN


def test_shipped_constants_are_those_of_the_fit():
    fitted = asdict(fit(TIMINGS, GPU, start=BY_FSDP2))
    assert fitted == pytest.approx(asdict(BY_FSDP2), rel=0.03)


@pytest.mark.parametrize("half", [0, 1])
def test_constants_of_one_half_predict_the_other(half):
    """By name in turn, so that cases that are alike are in both halves."""
    known = sorted(DECIDED_BY_GPU, key=lambda found: found.label)
    unseen = errors(known[1 - half :: 2], fit(known[half::2], GPU, start=BY_FSDP2))
    assert statistics.median(unseen) <= MEDIAN
    assert max(unseen) <= WORST


def made_up(constants: Constants, *, seconds: float = 0.0) -> list[Timing]:
    """Steps of many kinds that take exactly what the constants say, the last one longer by
    `seconds`."""
    found = [
        timing(f"{chosen}", shape, chosen, step_s=1.0)
        for shape in (llama_70b(layers=8), llama_70b(layers=3, vocab=128256))
        for chosen in (
            setup(processes=1),
            setup(processes=1, seq_len=128),
            setup(seq_len=128),
            setup(seq_len=8192),
            setup(micro_batch_size=8),
            setup(activation_checkpointing=False),
            setup(processes=1, dropout=0.05),
        )
    ]
    exact = [
        replace(each, step_s=gpu_seconds(each.work, GPU, constants=constants, traffic=each.traffic))
        for each in found
    ]
    return [*exact[:-1], replace(exact[-1], step_s=exact[-1].step_s + seconds)]


SLOWER = replace(H200, product_share=0.6, elementwise_traffic=25.0, launch_s=4e-3)


def test_fit_predicts_a_machine_that_is_slower_than_the_one_it_starts_from():
    timings = made_up(SLOWER)
    assert max(errors(timings, H200)) > 0.2
    assert max(errors(timings, fit(timings, GPU, start=H200))) < 0.03


def test_one_disturbed_measurement_hardly_moves_the_fit():
    constants = fit(made_up(SLOWER, seconds=10.0), GPU, start=H200)
    assert max(errors(made_up(SLOWER), constants)) < 0.06


def line(**changes: Any) -> dict[str, Any]:
    """A line of measurements.jsonl: as much of it as is read."""
    shape, chosen = llama_70b(layers=8), setup()
    return {
        "case": "flash", "status": "measured", "peer": None, "gpu_names": [GPU.name] * 2,
        "shape": shape.document(), "plan": asdict(chosen),
        "sizes": {"documents": 1, "accumulation": 2, "seq_len": 2048},
        "measured": {"tokens_per_s_per_process": 8192.0},
    } | changes  # fmt: skip


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return path


def test_line_of_the_benchmark_is_read_as_the_step_that_it_was(tmp_path):
    (found,) = read_timings(written(tmp_path / "m.jsonl", line()), GPU, name=GPU.name)
    assert found.step_s == 0.5  # two micro-batches of 2,048 tokens
    assert found.micro_batches == 2
    assert found.work == micro_batch_work(
        llama_70b(layers=8), setup(), trained_share=2047 / 2048, micro_batches=2
    )


@pytest.mark.parametrize(
    "other",
    [
        {"status": "out_of_memory"},
        {"peer": {"strategy": "ddp"}},
        {"gpu_names": ["NVIDIA A40"] * 2},
        {"plan": asdict(setup(attention="eager"))},
        {"sizes": {"documents": 8, "accumulation": 1, "seq_len": 2048}},
    ],
    ids=["failed", "peer", "another GPU", "eager", "packed"],
)
def test_what_the_roofline_does_not_know_is_not_fitted_to(tmp_path, other):
    path = written(tmp_path / "m.jsonl", line(**other), line())
    assert len(read_timings(path, GPU, name=GPU.name)) == 1


def test_basis_says_what_was_fitted_to_and_how_well(tmp_path):
    path = written(tmp_path / "m.jsonl", line(), line())
    speed = speed_of(machine(gpu_names=(GPU.name,) * 2), calibration=str(path))
    assert speed.basis.startswith("roofline fitted to 2 measurements on NVIDIA H200 (median ")


def test_gpu_that_no_table_knows_gets_times_from_its_own_measurements(tmp_path):
    name = "NVIDIA Future 9000"
    path = written(tmp_path / "m.jsonl", *[line(gpu_names=[name])] * 3)
    speed = speed_of(machine(gpu_names=(name,) * 2), calibration=str(path))
    parts = speed.parts(llama_70b(layers=8), setup(), trained_share=2047 / 2048, micro_batches=2)
    seconds = sum(parts.values())
    assert speed.known
    assert seconds == pytest.approx(0.25, rel=0.1)


def test_unknown_gpu_is_only_ranked_and_is_named():
    speed = speed_of(machine(gpu_names=("NVIDIA Future 9000",)), calibration=None)
    assert not speed.known
    assert "no speed is recorded for NVIDIA Future 9000" in speed.basis


def test_h100_is_said_to_be_held_against_steps_there():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GeForce RTX 4090")
    assert speed_of(machine(gpu_names=names), calibration=None).basis.endswith(
        "fitted to measurements on NVIDIA H200, scaled by data sheets to NVIDIA H100 80GB HBM3, "
        "and compared with steps there, scaled by data sheets to NVIDIA GeForce RTX 4090, "
        "not measured there"
    )


def test_slowest_kind_of_gpu_decides():
    kinds = (GPU.name, "NVIDIA GeForce RTX 3090")
    both, slow = (
        speed_of(machine(gpu_names=names), calibration=None).parts(
            llama_70b(), setup(), trained_share=1.0
        )
        for names in (kinds, kinds[1:])
    )
    assert both == slow


def test_cpu_time_is_called_rough():
    assert speed_of(cpu_machine(), calibration=None).basis.startswith("rough: 65 GFLOP/s")


def test_cpu_with_products_of_bfloat16_is_predicted_faster_in_it_and_says_so():
    """5.2 s a step in place of 9.4, measured."""
    wide, narrow = (
        speed_of(cpu_machine(bfloat16=True), calibration=None, compute_bytes=size)
        for size in (4, 2)
    )
    seconds = [
        sum(speed.parts(llama_70b(layers=2), setup(), trained_share=1.0).values())
        for speed in (wide, narrow)
    ]
    assert seconds[1] / seconds[0] == pytest.approx(5.2 / 9.4)
    assert "model.compute_dtype: bfloat16 would take about 55% of this time" in wide.basis
    assert narrow.basis.startswith("rough: 118 GFLOP/s per CPU process in bfloat16")


def test_cpu_without_products_of_bfloat16_promises_nothing_for_it():
    wide, narrow = (
        speed_of(cpu_machine(bfloat16=False), calibration=None, compute_bytes=size)
        for size in (4, 2)
    )
    assert wide.known
    assert "bfloat16" not in wide.basis
    assert not narrow.known
    assert narrow.basis.startswith("unknown: this CPU has no matmuls of bfloat16")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "it cannot be read"),
        ("{", "it is no measurements.jsonl"),
        ('{"status": "measured"}\n', "it is no measurements.jsonl"),
        ("[]\n", "it is no measurements.jsonl"),
        ("", "no measured step of our engine on NVIDIA GeForce RTX 4090"),
    ],
)
def test_calibration_that_cannot_serve_is_one_message(tmp_path, content, part):
    path = tmp_path / "m.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"hardware\.calibration = .*") as caught:
        speed_of(machine(), calibration=str(path))
    assert part in str(caught.value)
