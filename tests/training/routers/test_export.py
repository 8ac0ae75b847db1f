"""Trained routers on their way out: PEFT's files, stock packages, and the merged model."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.distributed import run_in_group
from tests.support.family_runs import merge
from tests.support.mixtures import MIXTURES, MORE_MIXTURES, tiny_mixture
from tests.support.models import quantized, stock_base
from tests.support.router_runs import CPU, config, router, single_documents, train
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.model_files import ADAPTER_WEIGHTS
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.export.adapter_files import read_sharded_adapter, save_adapter, with_corrections
from workflow.lib.export.packed_stacks import adapted_paths, exported_config
from workflow.lib.export.parity import compare_logits
from workflow.lib.export.stock_models import load_adapter
from workflow.lib.model.architecture.routers import CORRECTION
from workflow.lib.system.files import read_json

IDS = torch.arange(3, 40)[None]
MODELS = 8  # at most: that a rounding decides something in each of so many is unlikely


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By family: a mixture, its NF4 base, and a run that trains experts, linears and routers."""
    found = {}
    for family in (*MIXTURES, *MORE_MIXTURES):
        found[family] = tmp_path_factory.mktemp(family)
        quantized(tiny_mixture(family, found[family] / "original"), found[family] / "nf4")
    run_in_group(train_and_save, found, torch.float32, world_size=1)
    return found


@pytest.fixture(params=[*MIXTURES, *MORE_MIXTURES])
def family(request):
    return str(request.param)


@pytest.fixture
def folder(family, folders):
    return folders[family]


def train_and_save(world, folders, dtype):
    for family, folder in folders.items():
        settings = config(family, target_modules="all-linear")
        train(
            folder / "nf4", settings, single_documents(), world,
            folder=folder / f"run-{dtype}", dtype=dtype,
        )  # fmt: skip


def exported(folder, target, dtype=torch.float32):
    run = folder / f"run-{dtype}"
    adapter = read_sharded_adapter(run / "adapter")
    original = Checkpoint(folder / "original")
    names = original.names.peft(adapted_paths(adapter))
    settings = read_json(run / "adapter_config.json")
    with CheckpointReader(folder / "nf4") as base:
        whole = with_corrections(adapter, settings, model=original.model, base=base)
    tensors = {names.exported(name): tensor for name, tensor in whole.items()}
    save_adapter(tensors, exported_config(settings, original.names, adapter), target)


def check_reload(folder, target, dtype):
    exported(folder, target, dtype)
    base = stock_base(folder / "nf4", dtype=dtype, attention="eager")
    return compare_logits(
        load_adapter(base, Adapter(target)), folder / f"run-{dtype}" / "parity.safetensors",
        adapter=Adapter(target), compute_dtype=dtype, device=CPU,
    )  # fmt: skip


def test_stock_peft_reloads_routers_as_they_were_trained(family, folder, tmp_path):
    parity = check_reload(folder, tmp_path, torch.float32)
    assert read_json(tmp_path / "adapter_config.json")["modules_to_save"] == [router(family)]
    assert parity.identical_values
    assert parity.passed
    assert parity.adapter_effect > 0.02 * parity.rms_logit


@pytest.mark.parametrize("family", ["qwen3_moe", "ernie4_5_moe", "deepseek_v3"])
def test_routers_trained_in_bfloat16_are_served_as_trained(family, tmp_path):
    """Some compute in fp32, of which the adapter's bf16 copy has what the training's had. Where a
    rounding decides between two experts of a token, its logits are others, as in half of the tiny
    models of DeepSeek V3; routers that are served otherwise differ in all of them."""
    for seed in range(MODELS):
        folder = tmp_path / str(seed)
        tiny_mixture(family, folder / "original", dtype=torch.bfloat16, seed=seed)
        quantized(folder / "original", folder / "nf4")
        run_in_group(train_and_save, {family: folder}, torch.bfloat16, world_size=1)
        parity = check_reload(folder, folder / "adapter", torch.bfloat16)
        assert parity.identical_values
        if parity.passed:
            return
    pytest.fail(f"{MODELS} models are served otherwise than they were trained")


def test_merged_model_has_the_trained_routers(family, folder, tmp_path):
    """Against stock PEFT on the original, whose weights are rounded to bf16 once."""
    exported(folder, tmp_path / "adapter")
    merge(folder, folder / "run-torch.float32", tmp_path / "merged", onto="original")
    original = AutoModelForCausalLM.from_pretrained(
        folder / "original", dtype=torch.float32, attn_implementation="eager"
    )
    tuned = PeftModel.from_pretrained(original, str(tmp_path / "adapter")).eval()
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected, found = tuned(IDS).logits, merged(IDS).logits
        with tuned.disable_adapter():
            effect = (expected - tuned(IDS).logits).square().mean().sqrt()
    assert (found - expected).square().mean().sqrt() < 0.3 * effect
    for name, tensor in load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS).items():
        if f".{router(family)}." in name:
            kept = merged.state_dict()[name.removeprefix("base_model.model.")]
            assert torch.equal(kept, tensor.bfloat16().float()) or name.endswith(CORRECTION)
