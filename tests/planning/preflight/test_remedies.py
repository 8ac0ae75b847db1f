"""Changes of single settings that would make a run fit."""

from tests.support.decisions import llama_8b, run_config
from tests.support.made_up_memory import MadeUpMemory
from tests.support.preflight_examples import llama_70b, machine, setup
from workflow.lib.planning.preflight.budget import budget
from workflow.lib.planning.preflight.planning_inputs import plan_from_settings
from workflow.lib.planning.preflight.remedies import remedies
from workflow.lib.settings.config import HardwareConfig
from workflow.lib.system.units import GIB

AUTO = HardwareConfig()


def found(shape, plan, on=None, hardware=AUTO, most=99):
    memory = MadeUpMemory(shape)
    (peaks,) = memory.peaks([plan])
    return remedies(
        shape,
        plan,
        on or machine(),
        hardware,
        memory.peaks,
        before=peaks,
        global_batch_size=16,
        most=most,
    )


def rich(**changes):
    """A plan that has much to save."""
    values = {
        "micro_batch_size": 4, "activation_checkpointing": False, "dropout": 0.05, "rank": 64,
        "double_quant": False, "reshard_after_forward": False,
    }  # fmt: skip
    return setup(**values | changes)


def test_remedies_that_are_named_fit_the_nearest_first_and_no_more_than_asked_for():
    options = found(llama_8b, rich(), machine(gpu_bytes=30 * GIB), most=2)
    assert [option.change.split(" = ")[0] for option in options] == [
        "train.micro_batch_size", "train.activation_checkpointing",
    ]  # fmt: skip
    for remedy in options:
        assert remedy.fits
        assert budget(AUTO, machine(gpu_bytes=30 * GIB)).holds(remedy.peak_bytes)


def test_of_each_kind_the_smallest_change_that_fits_is_named():
    on = machine(gpu_bytes=30 * GIB)
    (rows,) = [x for x in found(llama_8b, rich(), on) if "micro_batch_size" in x.change]
    assert rows.change == "train.micro_batch_size = 2"
    (peaks,) = MadeUpMemory(llama_8b).peaks([rich()])
    assert not budget(AUTO, on).holds(peaks.allocated_bytes)


def test_where_none_is_enough_the_largest_savings_come_first():
    options = found(llama_70b(), rich(), machine(gpu_bytes=GIB))
    peaks = [option.peak_bytes for option in options]
    assert peaks == sorted(peaks)
    assert not any(option.fits for option in options)
    named = {str(option).split(" = ")[0] for option in options}
    assert {"train.micro_batch_size", "data.seq_len", "hardware.gpus", "lora.r"} <= named
    assert {"hardware.offload_layers", "hardware.reshard_after_forward"} <= named


def test_remedy_that_needs_more_host_memory_than_there_is_does_not_fit():
    on = machine(gpu_bytes=20 * GIB)
    few, many = (
        {
            remedy.change.split(" = ")[0]
            for remedy in found(llama_70b(), setup(), on, hardware)
            if remedy.fits
        }
        for hardware in (HardwareConfig(host_memory_gib=8.0), AUTO)
    )
    assert "hardware.offload_layers" in many - few


def test_frozen_modules_are_a_remedy():
    run = run_config(lora={"modules_to_save": ["lm_head", "embed_tokens"]})
    chosen = plan_from_settings(run, llama_8b, machine())
    options = found(llama_8b, chosen, hardware=run.hardware)
    assert [remedy for remedy in options if "modules_to_save" in str(remedy)]
    assert not any("offload_embedding" in str(remedy) for remedy in options)


def test_replicas_that_do_not_fit_may_become_one():
    options = found(llama_70b(), setup(processes=4, replicas=2), machine(processes=4))
    assert "hardware.shard_size = auto" in {str(option).split(" (")[0] for option in options}
