"""Changes of single settings that would make a run fit."""

from tests.support.decisions import llama_8b, run_config
from tests.support.preflight_examples import llama_70b, machine, setup
from workflow.lib.planning.memory import closed_form
from workflow.lib.planning.preflight.budget import budget
from workflow.lib.planning.preflight.planning_inputs import plan_from_settings
from workflow.lib.planning.preflight.remedies import remedies
from workflow.lib.settings.config import HardwareConfig
from workflow.lib.system.units import GIB


def test_every_remedy_that_is_said_to_fit_does_fit() -> None:
    chosen = setup(micro_batch_size=4, activation_checkpointing=False, dropout=0.05, rank=64)
    hardware = HardwareConfig()
    options = remedies(llama_70b(), chosen, machine(), hardware, global_batch_size=16)
    assert options
    for remedy in options:
        assert remedy.fits == budget(hardware, machine()).holds(remedy.peak_bytes)


def test_remedies_that_fit_come_first() -> None:
    options = remedies(
        llama_70b(), setup(dropout=0.05), machine(), HardwareConfig(), global_batch_size=16
    )
    fits = [option.fits for option in options]
    assert fits == sorted(fits, reverse=True)
    assert len(set(fits)) == 2


def test_remedies_name_every_setting_that_helps() -> None:
    chosen = setup(
        micro_batch_size=4, seq_len=512, activation_checkpointing=False, dropout=0.05,
        rank=64, double_quant=False, reshard_after_forward=False,
    )  # fmt: skip
    options = remedies(llama_8b, chosen, machine(), HardwareConfig(), global_batch_size=16)
    named = {str(option).split(" = ")[0] for option in options}
    assert named == {
        "train.micro_batch_size", "train.activation_checkpointing", "data.seq_len", "hardware.gpus",
        "lora.r", "quantize.double_quant", "lora.dropout", "hardware.reshard_after_forward",
        "train.fused_layers", "train.fused_loss", "hardware.offload_activations",
        "hardware.offload_embedding", "hardware.offload_layers", "train.optimizer",
    }  # fmt: skip


def test_remedy_that_needs_more_host_memory_than_there_is_does_not_fit() -> None:
    hardware = HardwareConfig(host_memory_gib=8.0)
    chosen, on = setup(micro_batch_size=1), machine(gpu_bytes=20 * GIB)
    few, many = (
        next(
            remedy
            for remedy in remedies(llama_70b(), chosen, on, settings, global_batch_size=2)
            if "offload_layers" in remedy.change
        )
        for settings in (hardware, HardwareConfig())
    )
    assert (few.fits, many.fits) == (False, True)


def test_frozen_modules_are_a_remedy() -> None:
    run = run_config(lora={"modules_to_save": ["lm_head", "embed_tokens"]})
    chosen = plan_from_settings(run, llama_8b, machine())
    options = remedies(llama_8b, chosen, machine(), run.hardware, global_batch_size=16)
    (option,) = [remedy for remedy in options if "modules_to_save" in str(remedy)]
    assert option.peak_bytes < closed_form.predict(llama_8b, chosen).peak_bytes
    assert not any("offload_embedding" in str(remedy) for remedy in options)


def test_replicas_that_do_not_fit_may_become_one() -> None:
    chosen = setup(processes=4, replicas=2)
    options = remedies(
        llama_70b(), chosen, machine(processes=4), HardwareConfig(), global_batch_size=16
    )
    assert "hardware.shard_size = auto" in {str(option).split(" (")[0] for option in options}
