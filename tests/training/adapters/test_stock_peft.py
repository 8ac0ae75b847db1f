"""Every kind of adapter against stock PEFT on stock bitsandbytes, over processes that nothing is
divisible by and copies of slices, through to the export.

Each group of processes trains all kinds one after the other; the reference trains each from the
same initial values."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.adapter_kinds import (
    ADDED,
    CPU,
    KINDS,
    ROWS,
    SEQ_LEN,
    WEIGHT_TOLERANCE,
    base_of,
    config,
    export,
    train_kinds,
)
from tests.support.distributed import run_in_group
from tests.support.models import stock_base
from tests.support.stock_training import stock, stock_peft
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.export.adapter_files import merged_tensors, read_sharded_adapter
from workflow.lib.export.parity import compare_logits
from workflow.lib.export.stock_models import load_adapter
from workflow.lib.model.lora import ROWS_TENSOR, unfreeze_
from workflow.lib.model.nf4_model import build_base_on_meta
from workflow.lib.settings.config import LoraSettings
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json

HEAD, EMBEDDING = "base_model.model.lm_head.", "base_model.model.model.embed_tokens."
# What is trained beside A and B.
TRAINED = {
    "head": {f"{HEAD}weight"},
    "embedding": {f"{EMBEDDING}weight"},
    "both": {f"{HEAD}weight", f"{EMBEDDING}weight"},
    "scaled and capped": {f"{HEAD}weight", f"{EMBEDDING}weight"},
    "rows, tied": {f"{EMBEDDING}{ROWS_TENSOR}"},
    "rows, untied": {f"{HEAD}{ROWS_TENSOR}", f"{EMBEDDING}{ROWS_TENSOR}"},
}
# fp32 on both sides, sums in another order; DoRA's norms are expanded here and summed there.
GRADIENT_TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}


@pytest.fixture(scope="module", params=[(1, 8), (3, 8), (4, 2)], ids=lambda p: f"{p[0]} processes")
def trained(request, folder, tmp_path_factory):
    """Four processes have two copies of two slices, as sixteen have of eight."""
    processes, enough = request.param
    target = tmp_path_factory.mktemp(f"of-{processes}")
    return target, run_in_group(train_kinds, folder, target, enough, [*KINDS], world_size=processes)


@pytest.fixture(scope="module")
def reference(folder):
    """The stock run of a kind; initial values do not depend on the number of processes."""
    made = {}

    def found(kind, initial):
        if kind not in made:
            base = base_of(folder, kind)
            made[kind] = stock(base, config(kind), initial, rows=ROWS, seq_len=SEQ_LEN)
        return made[kind]

    return found


@pytest.fixture(params=KINDS)
def kind(request):
    return str(request.param)


def test_run_is_that_of_stock_peft(trained, reference, kind):
    """Losses, norms over all that is trained, clipped gradients, and values after all steps; on
    every process."""
    initial = trained[1][0][kind]["initial"]
    theirs = reference(kind, initial)
    for process in trained[1]:
        ours = process[kind]
        torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=2e-5, atol=0)
        torch.testing.assert_close(ours["norms"], theirs["norms"], rtol=1e-4, atol=0)
        for one, other in zip(ours["gradients"], theirs["gradients"], strict=True):
            torch.testing.assert_close(one, other, **GRADIENT_TOLERANCE)
        torch.testing.assert_close(ours["weights"], theirs["weights"], **WEIGHT_TOLERANCE)
    ranks = {tensor.shape[0] for name, tensor in initial.items() if ".lora_A." in name}
    assert ranks == ({4, 5, 7} if kind == "patterns" else {4})
    beside = {name for name in initial if ".lora_" not in name}
    assert beside == TRAINED.get(kind, set())
    for name in beside:
        moved = (theirs["weights"][name] - initial[name]).abs().max()
        assert moved > 20 * WEIGHT_TOLERANCE["atol"]


@cache
def magnitudes_of_peft(base):
    params = stock_peft(base, config("dora").lora)[1]
    return {name: x.detach() for name, x in params.items() if name.endswith("magnitude_vector")}


def test_initial_magnitudes_are_pefts(folder, trained):
    """The norms of the dequantized rows; each process reads and dequantizes its own rows alone."""
    theirs = magnitudes_of_peft(base_of(folder, "dora"))
    assert len(theirs) == 21
    for process in trained[1]:
        ours = {name: process["dora"]["initial"][name] for name in theirs}
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_start_up_checks_hold_and_count_what_is_trained(trained, kind):
    for process in trained[1]:
        assert process[kind]["checks"] == [True] * 6
        trainable, total = process[kind]["counted"]
        assert trainable == sum(t.numel() for t in process[kind]["initial"].values())
        if KINDS[kind].base == "small":
            assert total == process["both"]["counted"][1]


def test_all_processes_have_the_same_values_bit_for_bit(trained, kind):
    """Each gathers the slices of its own copies."""
    first = trained[1][0][kind]["weights"]
    for process in trained[1]:
        assert all(torch.equal(first[n], t) for n, t in process[kind]["weights"].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stock_peft_reloads_the_export_as_it_was_trained(folder, trained, kind, dtype):
    run = trained[0] / kind
    exported = export(run)
    saved = read_json(exported / "adapter_config.json")["modules_to_save"] or []
    assert saved == sorted(KINDS[kind].lora.get("modules_to_save", ()))
    base = stock_base(base_of(folder, kind), dtype=dtype)
    model = load_adapter(base, Adapter(exported))
    model.tie_weights()  # as lm-eval does
    parity = compare_logits(
        model, run / "parity.safetensors",
        adapter=Adapter(exported), compute_dtype=dtype, device=CPU,
    )  # fmt: skip
    assert parity.identical_values
    if dtype == torch.float32:
        assert parity.passed
        assert parity.adapter_effect > 100 * parity.tolerance
        assert parity.adapter_effect > 0.1 * parity.rms_logit * bool(saved)


def test_merged_model_is_that_of_peft_and_has_what_is_trained_beside_adapters(
    folder, trained, kind
):
    run, base = trained[0] / kind, base_of(folder, kind)
    exported, adapter = export(run), read_sharded_adapter(run / "adapter")
    settings, source = read_json(run / "adapter_config.json"), base.with_name("original")
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    theirs = load_adapter(original, Adapter(exported)).merge_and_unload().state_dict()
    with CheckpointReader(source) as whole, Checkpoint(base).decoded() as nf4:
        ours = dict(merged_tensors(adapter, settings, original=whole, nf4=nf4, onto="original"))
    assert theirs.keys() - ours.keys() == ({"lm_head.weight"} if kind == "rows, tied" else set())
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name].bfloat16(), rtol=2**-7, atol=1e-6)
    for name in TRAINED.get(kind, ()):
        table = ours["lm_head.weight" if name.startswith(HEAD) else "model.embed_tokens.weight"]
        part = table[ADDED.start : ADDED.stop] if kind.startswith("rows") else table
        assert torch.equal(part, adapter[name].bfloat16())


def test_trained_module_that_the_model_has_not_is_refused(folder):
    adapter = {"base_model.model.embed_out.weight": torch.ones(1)}
    with (
        CheckpointReader(folder / "small" / "original") as source,
        Checkpoint(folder / "small" / "nf4").decoded() as nf4,
    ):
        tensors = merged_tensors(adapter, {}, original=source, nf4=nf4, onto="original")
        with pytest.raises(UserError, match=r"tensors for base_model.model.embed_out.weight, wh"):
            list(tensors)


def test_name_that_peft_would_find_elsewhere_too_is_refused(folder):
    model = build_base_on_meta(
        Checkpoint(folder / "small" / "nf4"), compute_dtype=torch.float32, attention="sdpa"
    )
    model.model.other_lm_head = torch.nn.Identity()
    settings = LoraSettings(modules_to_save=("lm_head",))
    with pytest.raises(UserError, match=r"'lm_head': model\.other_lm_head ends so too"):
        unfreeze_(model, settings)
