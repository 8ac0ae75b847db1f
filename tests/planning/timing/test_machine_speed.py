"""What a prediction of time rests on, by machine."""

import pytest

from tests.support.made_up_memory import made_up_work
from tests.support.preflight_examples import cpu_machine, llama_70b, machine, setup
from tests.support.probes import probe
from workflow.lib.planning.timing.machine_speed import speed_of
from workflow.lib.planning.timing.rates import CPU, H200, PROBED_CPU, PROBED_H200, rates_of
from workflow.lib.system.gpu_models import BY_NAME


def test_unknown_gpu_is_only_ranked_and_is_named():
    speed = speed_of(machine(gpu_names=("NVIDIA Future 9000",)))
    assert not speed.measured
    assert "no speed is recorded for NVIDIA Future 9000 (`python -m workflow" in speed.basis


def test_other_gpu_is_said_to_be_scaled_and_not_measured():
    basis = speed_of(machine()).basis
    assert "scaled by data sheets to NVIDIA GeForce RTX 4090, not measured there (`pyth" in basis


def test_each_kind_of_gpu_is_said_to_be_measured_or_not():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GeForce RTX 4090")
    assert speed_of(machine(gpu_names=names)).basis == (
        "recorded work, at rates scaled by data sheets to NVIDIA GeForce RTX 4090, not measured "
        "there (`python -m workflow.scripts.probe` does) and fitted to measurements on NVIDIA H100 "
        "80GB HBM3 and fitted to measurements on NVIDIA H200"
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
    assert speed_of(cpu_machine()).basis.startswith("rough: 103 GFLOP/s")


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
    assert narrow.basis.startswith("rough: 186 GFLOP/s per CPU process in bfloat16")


def test_cpu_without_products_of_bfloat16_promises_nothing_for_it():
    wide, narrow = (speed_of(cpu_machine(bfloat16=False), compute_bytes=size) for size in (4, 2))
    assert wide.measured
    assert "bfloat16" not in wide.basis
    assert not narrow.measured
    assert narrow.basis.startswith("unknown: this CPU has no matmuls of bfloat16")


def test_gpu_that_only_a_probe_knows_is_predicted_and_the_probe_is_named():
    found = probe("new", PROBED_H200, 0.5)
    speed = speed_of(machine(gpu_names=("new",), probes={"new": found}))
    assert speed.measured
    assert "from a probe of new of 2026-11-27 (driver 1, torch 2.11.0)" in speed.basis


def test_rates_are_an_h200s_times_what_the_same_probe_finds():
    rates = rates_of(BY_NAME["NVIDIA H200"], probe("NVIDIA H200", PROBED_H200, 0.5))
    assert rates.flops == {kind: rate / 2 for kind, rate in H200.flops.items()}
    for name in ("memory", "decoding", "host"):
        assert getattr(rates, name) == getattr(H200, name) / 2
    launches = ("launch_s", "prepared_launch_s", "collective_launch_s")
    for name in ("gap_s", "pause_s", *launches):
        assert getattr(rates, name) == getattr(H200, name) * 2
    assert rates.collective == H200.collective
    assert rates.host_spread < H200.host_spread


def test_measurement_that_varied_replaces_nothing_and_is_named():
    vague = probe("NVIDIA H200", PROBED_H200, 0.5, vague={"decoding", "attention 2048"})
    rates = rates_of(BY_NAME["NVIDIA H200"], vague)
    assert rates.decoding == H200.decoding
    assert rates.memory == H200.memory / 2
    assert "but for attention 2048, decoding, which varied too much" in rates.source


def test_gathers_take_what_a_probe_of_several_gpus_found():
    found = probe("NVIDIA H200", {"collective": 1e9}, 1.0)
    (clock,) = speed_of(
        machine(gpu_names=("NVIDIA H200",) * 2, probes={"NVIDIA H200": found})
    ).clocks
    assert clock.fabric.local * clock.fabric.attained == pytest.approx(1e9)
    assert clock.rates.flops == H200.flops


def test_cpu_that_reaches_half_takes_twice_as_long():
    work = made_up_work(llama_70b(layers=2), setup())
    slow = probe("new", PROBED_CPU, 0.5)
    speeds = [speed_of(cpu_machine(cpu="new", probes=found)) for found in ({}, {"new": slow})]
    one, two = (
        sum(x.parts(work, setup(), num_layers=2, trained_share=1.0).values()) for x in speeds
    )
    assert two == pytest.approx(2 * one)
    assert f"{CPU.flops / 2e9:.0f} GFLOP/s per CPU process, from a probe of new" in speeds[1].basis
