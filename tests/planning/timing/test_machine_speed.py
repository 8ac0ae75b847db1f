"""What a prediction of time rests on, by machine."""

import pytest

from tests.support.made_up_memory import made_up_work
from tests.support.preflight_examples import cpu_machine, llama_70b, machine, setup
from workflow.lib.planning.timing.machine_speed import speed_of


def test_unknown_gpu_is_only_ranked_and_is_named():
    speed = speed_of(machine(gpu_names=("NVIDIA Future 9000",)))
    assert not speed.known
    assert "no speed is recorded for NVIDIA Future 9000" in speed.basis


def test_other_gpu_is_said_to_be_scaled_and_not_measured():
    basis = speed_of(machine()).basis
    assert "scaled by data sheets to NVIDIA GeForce RTX 4090, not measured there" in basis


def test_each_kind_of_gpu_is_said_to_be_measured_or_not():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GeForce RTX 4090")
    assert speed_of(machine(gpu_names=names)).basis == (
        "recorded work, at rates scaled by data sheets to NVIDIA GeForce RTX 4090, not measured "
        "there and fitted to measurements on NVIDIA H100 80GB HBM3 and fitted to measurements on "
        "NVIDIA H200"
    )


def test_slowest_kind_of_gpu_decides():
    kinds = ("NVIDIA H200", "NVIDIA GeForce RTX 3090")
    work = made_up_work(llama_70b(), setup())
    both, slow = (
        speed_of(machine(gpu_names=names)).parts(work, setup(), num_layers=80, trained_share=1.0)
        for names in (kinds, kinds[1:])
    )
    assert both == slow


def test_cpu_time_is_called_rough():
    assert speed_of(cpu_machine()).basis.startswith("rough: 65 GFLOP/s")


def test_cpu_with_products_of_bfloat16_is_predicted_faster_in_it_and_says_so():
    """5.2 s a step in place of 9.4, measured."""
    work = made_up_work(llama_70b(layers=2), setup())
    wide, narrow = (speed_of(cpu_machine(bfloat16=True), compute_bytes=size) for size in (4, 2))
    seconds = [
        sum(speed.parts(work, setup(), num_layers=2, trained_share=1.0).values())
        for speed in (wide, narrow)
    ]
    assert seconds[1] / seconds[0] == pytest.approx(5.2 / 9.4, rel=0.05)
    assert "model.compute_dtype: bfloat16 would take about 55% of this time" in wide.basis
    assert narrow.basis.startswith("rough: 118 GFLOP/s per CPU process in bfloat16")


def test_cpu_without_products_of_bfloat16_promises_nothing_for_it():
    wide, narrow = (speed_of(cpu_machine(bfloat16=False), compute_bytes=size) for size in (4, 2))
    assert wide.known
    assert "bfloat16" not in wide.basis
    assert not narrow.known
    assert narrow.basis.startswith("unknown: this CPU has no matmuls of bfloat16")
