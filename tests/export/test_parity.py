"""The proof that the exported adapter is the trained one: what passes, and all that must not."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models import adapted, random_store, stock_base
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.export.adapter_files import read_sharded_adapter, save_adapter
from workflow.lib.export.parity import POSITIONS, compare_logits, save_logits, trained_logits
from workflow.lib.export.stock_models import load_adapter
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.system.files import read_checked_json

CPU = torch.device("cpu")
A = "base_model.model.model.layers.2.mlp.up_proj.lora_A.weight"


@pytest.fixture(scope="module")
def record(run):
    return load_file(run / "finetune" / "parity.safetensors")


def reloaded(run, folder, **changes):
    adapter = read_sharded_adapter(run / "finetune" / "adapter")
    save_adapter(
        adapter | changes, read_checked_json(run / "finetune" / "adapter_config.json"), folder
    )
    base = stock_base(run / "base")
    return load_adapter(base, Adapter(folder))


def compare(model, path, exported):
    adapter = Adapter(exported)
    return compare_logits(model, path, adapter=adapter, compute_dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("change", [1.0, 2**-12], ids=["much", "one part in four thousand"])
def test_one_altered_value_fails(run, tmp_path, change):
    """However small its effect on the logits: the second alteration is far below their
    tolerance."""
    altered = read_sharded_adapter(run / "finetune" / "adapter")[A]
    altered[1, 5] *= 1 + change
    parity = compare(
        reloaded(run, tmp_path, **{A: altered}), run / "finetune" / "parity.safetensors", tmp_path
    )
    assert not parity.identical_values
    assert not parity.passed
    if change < 1e-3:
        assert parity.rms_difference < parity.tolerance


def test_same_values_put_to_other_use_fail(run, tmp_path):
    """A wrong scale, for one."""
    model = reloaded(run, tmp_path)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] *= 1.01
    parity = compare(model, run / "finetune" / "parity.safetensors", tmp_path)
    assert parity.identical_values
    assert not parity.passed
    assert parity.rms_difference > parity.tolerance


def test_value_that_peft_holds_otherwise_than_the_file_fails(run, tmp_path):
    model = reloaded(run, tmp_path)
    model.get_parameter(A.replace(".weight", ".default.weight")).data[1, 5] += 2**-12
    parity = compare(model, run / "finetune" / "parity.safetensors", tmp_path)
    assert not parity.identical_values
    assert not parity.passed


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["recorded", "reloaded", "both"])
def test_logits_that_are_not_finite_fail(run, record, tmp_path, value, where):
    model, changed = reloaded(run, tmp_path), dict(record)
    if where != "reloaded":
        changed["logits.1"] = changed["logits.1"].clone()
        changed["logits.1"][3, 7] = value
    if where != "recorded":
        model.get_base_model().lm_head.weight.data[7] = value
    save_file(changed, tmp_path / "parity.safetensors")
    parity = compare(model, tmp_path / "parity.safetensors", tmp_path)
    assert parity.passed is False


def test_record_has_the_last_positions_of_two_documents(record):
    documents = random_store(rows=11, seq_len=23).heldout_documents()
    assert record.keys() == {"digest", "input_ids.0", "logits.0", "input_ids.1", "logits.1"}
    for number in range(2):
        ids = record[f"input_ids.{number}"]
        assert ids.tolist() == documents[number][0].tolist()
        assert record[f"logits.{number}"].shape == (min(len(ids), POSITIONS), 211)
        assert record[f"logits.{number}"].dtype == torch.float32


def test_record_of_one_process_is_that_of_two(run, record, tmp_path):
    training = adapted(run / "base", r=3, alpha=7.5, use_rslora=True)
    values = read_sharded_adapter(run / "finetune" / "adapter")
    with torch.no_grad():
        for name, param in trainable_parameters(training).items():
            param.copy_(values[name])
    single = trained_logits(training, random_store(rows=11, seq_len=23), device=CPU)
    assert torch.equal(single["digest"], record["digest"])
    torch.testing.assert_close(single["logits.1"], record["logits.1"], rtol=1e-5, atol=1e-4)
    save_logits(single, tmp_path / "parity.safetensors")
    assert load_file(tmp_path / "parity.safetensors").keys() == record.keys()


def test_one_logit_far_off_is_no_other_use_of_the_adapter(run, record, tmp_path):
    """Rounding to 16 bits puts some of millions of logits far off."""
    changed = dict(record)
    changed["logits.1"] = changed["logits.1"].clone()
    changed["logits.1"][3, 7] += 1e-4 * changed["logits.1"].abs().max()
    save_file(changed, tmp_path / "parity.safetensors")
    parity = compare(reloaded(run, tmp_path), tmp_path / "parity.safetensors", tmp_path)
    assert parity.passed
