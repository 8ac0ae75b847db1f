"""Head and embedding trained whole: against stock PEFT's `modules_to_save`, over processes and
copies of slices, to the export."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.distributed import run_distributed
from tests.support.models import VOCAB, quantized
from tests.support.stock_training import stock
from tests.support.trained_modules import (
    CPU,
    KINDS,
    ROWS,
    SEQ_LEN,
    WEIGHT_TOLERANCE,
    config,
    export,
    train_kinds,
)
from workflow.lib.export.adapter_files import merged_tensors, read_sharded_adapter
from workflow.lib.export.parity import compare_logits
from workflow.lib.export.stock_models import ADAPTER_WEIGHTS, load_adapter, load_base
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.system.files import read_json

HEAD, EMBEDDING = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
# fp32 on both sides, sums in another order. AdamW divides gradients by their own magnitude, so
# adam_eps is far above their rounding errors.
GRADIENT_TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(scope="module", params=[(1, 8), (3, 8), (4, 2)], ids=lambda p: f"{p[0]} processes")
def trained(request, folder):
    """Four processes have two copies of two slices, as sixteen have of eight."""
    processes, enough = request.param
    target = folder / f"of-{processes}"
    results = run_distributed(
        train_kinds, folder / "nf4", target, enough, list(KINDS), world_size=processes
    )
    return target, results


@pytest.fixture(scope="module")
def references(folder):
    """Filled as tests ask; initial values do not depend on the number of processes."""
    return {}


@pytest.fixture(params=KINDS)
def kind(request):
    return str(request.param)


def test_run_is_that_of_stock_peft(folder, trained, references, kind):
    """Losses, norms over adapters and modules together, clipped gradients, and values after all
    steps; on every process."""
    initial = trained[1][0][kind]["initial"]
    theirs = references.get(kind) or references.setdefault(
        kind, stock(folder / "nf4", config(kind), initial, rows=ROWS, seq_len=SEQ_LEN)
    )
    for process in trained[1]:
        ours = process[kind]
        torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=2e-5, atol=0)
        torch.testing.assert_close(ours["norms"], theirs["norms"], rtol=1e-4, atol=0)
        for one, other in zip(ours["gradients"], theirs["gradients"], strict=True):
            torch.testing.assert_close(one, other, **GRADIENT_TOLERANCE)
        torch.testing.assert_close(ours["weights"], theirs["weights"], **WEIGHT_TOLERANCE)
    expected = {"head": {HEAD}, "embedding": {EMBEDDING}, "both": {HEAD, EMBEDDING}}[kind]
    assert {name for name in initial if ".lora_" not in name} == expected
    for name in expected:
        moved = (theirs["weights"][name] - initial[name]).abs().max()
        assert moved > 20 * WEIGHT_TOLERANCE["atol"]


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    """A folder with Gemma 3 with a head of its own, in `original` and quantized in `nf4`."""
    settings = AutoConfig.for_model(
        "gemma3_text",
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
        final_logit_softcapping=3.0,
    )
    folder = tmp_path_factory.mktemp("capped")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder / "original")
    quantized(folder / "original", folder / "nf4")
    return folder


def test_family_that_scales_its_embedding_and_caps_its_logits_is_that_of_stock_peft(
    capped, references
):
    arguments = (capped / "nf4", capped / "run", 8, ["both"])
    for ours in run_distributed(train_kinds, *arguments, world_size=2):
        initial = ours["both"]["initial"]
        theirs = references.get("capped") or references.setdefault(
            "capped", stock(capped / "nf4", config("both"), initial, rows=ROWS, seq_len=SEQ_LEN)
        )
        assert ours["both"]["checks"] == [True] * 6
        torch.testing.assert_close(ours["both"]["losses"], theirs["losses"], rtol=2e-5, atol=0)
        for one, other in zip(ours["both"]["gradients"], theirs["gradients"], strict=True):
            torch.testing.assert_close(one, other, **GRADIENT_TOLERANCE)


def test_start_up_checks_hold_and_count_the_modules(trained, kind):
    for process in trained[1]:
        assert process[kind]["checks"] == [True] * 6
        trainable, total = process[kind]["counted"]
        assert trainable == sum(t.numel() for t in process[kind]["initial"].values())
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
    assert read_json(exported / "adapter_config.json")["modules_to_save"] == sorted(KINDS[kind])
    base = load_base(folder / "nf4", device=CPU, compute_dtype=dtype, attention="sdpa")
    parity = compare_logits(
        load_adapter(base, exported), run / "parity.safetensors",
        exported=exported / ADAPTER_WEIGHTS, compute_dtype=dtype, device=CPU,
    )  # fmt: skip
    assert parity.identical_values
    assert parity.adapter_effect > 0.1 * parity.rms_logit
    if dtype == torch.float32:
        assert parity.passed


def test_merged_model_has_the_trained_modules(folder, trained, kind):
    run = trained[0] / kind
    exported = export(run)
    adapter, settings = (
        read_sharded_adapter(run / "adapter"),
        read_json(run / "adapter_config.json"),
    )
    original = AutoModelForCausalLM.from_pretrained(folder / "original", dtype=torch.float32)
    theirs = load_adapter(original, exported).merge_and_unload().state_dict()
    with CheckpointReader(folder / "original") as source, CheckpointReader(folder / "nf4") as nf4:
        ours = dict(merged_tensors(adapter, settings, original=source, nf4=nf4, onto="original"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name].bfloat16(), rtol=2**-7, atol=1e-6)
    for name in {HEAD, EMBEDDING} & adapter.keys():
        assert torch.equal(ours[name.removeprefix("base_model.model.")], adapter[name].bfloat16())
