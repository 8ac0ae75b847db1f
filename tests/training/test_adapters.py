"""Every kind of adapter against stock PEFT on stock bitsandbytes, over processes that nothing is
divisible by, through to the export.

Each group of processes trains all kinds one after the other; the reference trains each from the
same initial values."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from tests.support.built_models import built_model
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.models import adapted, quantized, random_store, tiny_llama
from tests.support.plans import make_plan
from tests.support.stock_training import stock, stock_peft, trained
from workflow.lib.distributed.world import process_group
from workflow.lib.export.adapter_files import (
    merged_tensors,
    read_sharded_adapter,
    save_adapter,
)
from workflow.lib.export.parity import compare_logits, save_logits, trained_logits
from workflow.lib.export.stock_models import ADAPTER_WEIGHTS, load_adapter, load_base
from workflow.lib.model.fusion.fuse_layers import fuse_layers_
from workflow.lib.model.layers.adapter_dropout import AdapterDropout, row_keys
from workflow.lib.model.layers.dora import lengthened
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json, write_json
from workflow.lib.training.batches import stored_batch
from workflow.lib.training.checkpoint import save_adapter as save_sharded

STEPS, BATCH, ROWS, SEQ_LEN = 2, 15, 15, 11
CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True, "alpha": 6.0},
    "patterns": {
        "target_modules": r"model\.layers\.[02]\..*(q_proj|v_proj|mlp\.\w+_proj)",
        "rank_pattern": {"q_proj": 7, r"layers\.2\.mlp\.\w+": 5},
        "alpha_pattern": {"down_proj": 21.0},
        "use_rslora": True,
    },
}  # fmt: skip
TRAIN = TrainConfig(
    epochs=None, max_steps=STEPS, global_batch_size=BATCH, learning_rate=1e-2, max_grad_norm=None
)
# fp32 on both sides, sums in another order; DoRA's norms are expanded here and summed there.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}


def lora(kind):
    return LoraSettings(r=4, **KINDS[kind])


def train_kinds(base, folder):
    """Train every kind in this group; leave the sharded adapter and the record of its logits in
    `folder`."""
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        return {kind: train_one(base, kind, folder / str(n), world) for n, kind in enumerate(KINDS)}


def settings_of(kind):
    return RunConfig(lora=lora(kind), train=TRAIN)


def train_one(base, kind, folder, world):
    model = built_model(base, settings_of(kind), make_plan(), world)
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    found = trained(model, TRAIN, store, world, micro_batch_size=BATCH // world.size)
    (folder / "adapter").mkdir(parents=True, exist_ok=True)
    save_sharded(model.training, folder / "adapter", world=world)
    logits = trained_logits(model.training, store, device=world.device)
    if world.is_main:
        save_logits(logits, folder / "parity.safetensors")
        write_json(folder / "adapter_config.json", model.adapter_config())
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    quantized(tiny_llama(folder / "original", attention_bias=True, **sizes), folder / "nf4")
    return folder


@pytest.fixture(scope="module", params=[1, 3], ids=lambda n: f"{n} processes")
def runs(request, folder):
    target = folder / f"of-{request.param}"
    results = run_distributed(train_kinds, folder / "nf4", target, world_size=request.param)
    return target, results[0]


@pytest.fixture(scope="module")
def references(folder):
    """Filled as tests ask; initial values do not depend on the number of processes."""
    return {}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_stock_peft(folder, runs, references, kind):
    _, results = runs
    ours = results[kind]
    if kind not in references:
        references[kind] = stock(
            folder / "nf4", settings_of(kind), ours["initial"], rows=ROWS, seq_len=SEQ_LEN
        )
    theirs = references[kind]
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=2e-5, atol=0)
    for one, other in zip(ours["gradients"], theirs["gradients"], strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)
    assert {t.shape[0] for n, t in ours["initial"].items() if ".lora_A." in n} == (
        {4} if kind == "dora" else {4, 5, 7}
    )


def test_initial_magnitudes_are_pefts(folder, runs, references):
    """The norms of the dequantized rows; each process reads and dequantizes its own rows alone."""
    initial = runs[1]["dora"]["initial"]
    if "own" not in references:
        references["own"] = stock_peft(folder / "nf4", lora("dora"))[1]
    names = [name for name in initial if name.endswith("magnitude_vector")]
    assert len(names) == 21
    for name in names:
        torch.testing.assert_close(
            initial[name], references["own"][name].detach(), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("kind", KINDS)
def test_stock_peft_reloads_the_exported_adapter_as_it_was_trained(folder, runs, kind):
    run = runs[0] / str(list(KINDS).index(kind))
    adapter = read_sharded_adapter(run / "adapter")
    save_adapter(adapter, read_json(run / "adapter_config.json"), run / "exported")
    base = load_base(folder / "nf4", device=CPU, compute_dtype=torch.float32, attention="sdpa")
    tuned = load_adapter(base, run / "exported")
    parity = compare_logits(
        tuned, run / "parity.safetensors",
        exported=run / "exported" / ADAPTER_WEIGHTS, compute_dtype=torch.float32, device=CPU,
    )  # fmt: skip
    assert parity.identical_values
    assert parity.passed
    assert parity.adapter_effect > 100 * parity.tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_that_peft_merges(folder, runs, kind):
    run = runs[0] / str(list(KINDS).index(kind))
    adapter, config = read_sharded_adapter(run / "adapter"), read_json(run / "adapter_config.json")
    save_adapter(adapter, config, run / "exported")
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(folder / "original", dtype=torch.float32)
    theirs = load_adapter(original, run / "exported").merge_and_unload().state_dict()
    with CheckpointReader(folder / "original") as source, CheckpointReader(folder / "nf4") as nf4:
        ours = dict(merged_tensors(adapter, config, original=source, nf4=nf4, onto="original"))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name].bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True], ids=["linear by linear", "fused layers"])
@pytest.mark.parametrize("use_dora", [False, True], ids=["plain", "DoRA"])
def test_dropout_is_pefts_with_our_masks(folder, use_dora, fused):
    """PEFT's own layers, given our masks, have our loss and gradients."""
    ours = adapted(folder / "nf4", r=4, use_dora=use_dora, dropout=0.4).train()
    if fused:
        fuse_layers_(ours.peft_model.get_base_model())  # type: ignore[operator]
    base = load_base(folder / "nf4", device=CPU, compute_dtype=torch.float32, attention="sdpa")
    config = LoraConfig(
        r=4, lora_alpha=32, lora_dropout=0.4, use_dora=use_dora, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = get_peft_model(base, config).train()
    give_masks(theirs, ours)
    params = {
        n.replace(".default", "").replace("vector.weight", "vector"): p
        for n, p in theirs.named_parameters()
        if p.requires_grad
    }
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in trainable_parameters(ours).items():
            draw = torch.rand(param.shape, generator=generator)
            param.copy_(param * (0.5 + draw) if "magnitude" in name else 0.2 * draw - 0.1)
            params[name].copy_(param)
    store, rows = random_store(rows=3, seq_len=SEQ_LEN), np.arange(3)
    keys = torch.tensor(row_keys(0, step=4, rows=rows))
    batch = replace(stored_batch(store, rows), row_keys=keys)
    loss = ours(batch)
    logits = theirs(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
    ).logits.flatten(0, 1)
    expected = cross_entropy(logits[batch.positions], batch.targets, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    loss.backward()
    expected.backward()
    for name, param in trainable_parameters(ours).items():
        largest = float(params[name].grad.abs().max())
        torch.testing.assert_close(param.grad, params[name].grad, rtol=1e-3, atol=1e-4 * largest)


def give_masks(theirs, ours):
    layers = [m for m in theirs.modules() if isinstance(m, LoraLayer)]
    assert len(layers) == 21
    for number, layer in enumerate(layers):
        layer.lora_dropout["default"] = AdapterDropout(0.4).train()
        layer.lora_dropout["default"].share(ours.adapters, linear=number)


def test_gradient_of_doras_magnitudes_is_made_in_fp32():
    """300 tokens in bf16: rounded to bf16 the gradient would be off by up to 2^-9 of itself, a
    hundred times the tolerance. Backward has the value, whose own rounding averages out."""
    draw = torch.Generator().manual_seed(0)
    direction = torch.randn(2, 150, 13, generator=draw).bfloat16().requires_grad_()
    factor = (torch.rand(13, generator=draw) + 0.1).requires_grad_()
    grad = torch.randn(2, 150, 13, generator=draw).bfloat16()
    y = lengthened(direction, factor)
    assert torch.equal(y, (direction.float() * factor).bfloat16())
    of_direction, of_factor = torch.autograd.grad(y, (direction, factor), grad)
    assert of_factor.dtype == torch.float32
    directions = (y.detach().double() / factor.detach().double(), direction.detach().double())
    exact, ideal = ((grad.double() * x).sum(dim=(0, 1)) for x in directions)
    torch.testing.assert_close(of_factor.double(), exact, rtol=1e-5, atol=1e-5)
    # 300 errors of at most 2^-9 of a value of order 1: the root of their number times that
    torch.testing.assert_close(of_factor.double(), ideal, rtol=0, atol=5 * 300**0.5 * 2**-9)
    assert torch.equal(of_direction, (grad.float() * factor.detach()).bfloat16())


@torch.no_grad()
def test_dora_of_rows_that_are_not_whole_blocks_starts_as_the_base_model(tmp_path):
    """B is zero, so m / n is 1: the lengths read from the file are those of the weights that are
    multiplied with."""
    base = quantized(tiny_llama(tmp_path / "original"), tmp_path / "nf4")
    ours = adapted(base, r=4, use_dora=True)
    theirs = load_base(base, device=CPU, compute_dtype=torch.float32, attention="sdpa")
    ids, places = torch.arange(13)[None], torch.arange(13)
    expected = theirs(input_ids=ids, use_cache=False).logits[0]
    found = ours.logits(ids, places[None], places)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_row_of_zeros_that_dora_cannot_scale_is_named(tmp_path):
    source = tiny_llama(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][7] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    base = quantized(source, tmp_path / "nf4")
    with pytest.raises(UserError) as refusal:
        adapted(base, use_dora=True)
    assert str(refusal.value).startswith(
        "lora.use_dora = True: row 7 of model.layers.1.self_attn.o_proj is zero in the NF4 base"
    )
    assert "leave o_proj out of lora.target_modules" in str(refusal.value)
    adapted(base, use_dora=True, target_modules=["q_proj"])
