"""What no memory option can take away, beside recordings that are shipped with the models."""

from dataclasses import replace

import pytest

from tests.support.preflight_examples import llama_70b, machine, setup
from workflow.lib.model.architecture.shipped_shapes import known_config, known_shape
from workflow.lib.planning.machine import imagined_machine
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.model_sizes import trainable_parameters
from workflow.lib.planning.preflight.budget import budget, certain_lack, host_bytes
from workflow.lib.planning.preflight.planning_inputs import plan_from_settings
from workflow.lib.planning.preflight.what_if import settings_of
from workflow.lib.recording.kept_tapes import known_peaks
from workflow.lib.recording.recording_process import PlanRecorder
from workflow.lib.settings.config import HardwareConfig
from workflow.lib.system.gpu_models import BY_NAME
from workflow.lib.system.units import GIB

NOTHING = Peaks({"load": {}})
MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("on_host", [False, True])
def test_what_a_recorded_plan_takes_is_never_said_to_be_too_little(name, processes, on_host):
    config, shape = known_config(name), known_shape(name)
    run = settings_of([], seq_len=2048, rank=16, processes=processes, batch=None)
    gpus = imagined_machine(processes, BY_NAME["NVIDIA GeForce RTX 4090"])
    plan = replace(
        plan_from_settings(run, shape, gpus),
        accumulation_steps=16 // processes,
        offload_layers=on_host * shape.num_layers,
    )
    recorder = PlanRecorder(None, config, shape)
    peaks = known_peaks(config, recorder.recorded_plan(plan), checked=True)
    host = host_bytes(shape, plan, gpus, peaks)
    limits = budget(HardwareConfig(), replace(gpus, gpu_bytes=0, host_bytes=host))
    needed = peaks.allocated_bytes + limits.outside_allocator_bytes + limits.margin_bytes
    there = replace(limits, capacity_bytes=needed)
    assert certain_lack(shape, plan, gpus, there) is None
    less = replace(there, capacity_bytes=needed // 4, host_capacity_bytes=host // 4)
    assert certain_lack(shape, plan, gpus, less) is not None


def test_packed_weights_have_what_gpus_and_host_have_room_for():
    shape, plan = llama_70b(), setup(processes=1)
    on = machine(gpu_bytes=24 * GIB, host_bytes=64 * GIB)
    limits = budget(HardwareConfig(), on)
    assert certain_lack(shape, plan, on, limits) is None
    little = replace(limits, host_capacity_bytes=16 * GIB)
    lack = certain_lack(shape, plan, on, little)
    assert "GiB and has 16.00" in lack
    unknown = replace(limits, host_capacity_bytes=None)
    assert certain_lack(shape, plan, on, unknown) is None
    assert host_bytes(shape, plan, on, Peaks({})) < 16 * GIB  # it is the weights that lack room


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("processes", [1, 2])
def test_start_values_of_a_reference_are_in_host_memory(device, processes):
    """4 bytes of each trained parameter: every process has its slice."""
    shape, plan = llama_70b(), setup(processes=processes)
    on = machine(processes=processes, device=device)
    plain, copied = (
        host_bytes(shape, replace(plan, objective="dpo", start_reference=x), on, NOTHING)
        for x in (False, True)
    )
    trained = trainable_parameters(shape, plan)
    assert copied - plain == processes * (4 * trained // processes)
