"""What the engine makes of the families' tiny models, and what stock Transformers and PEFT make of
them.

The engine's run is the product's own: plan, processes, start-up checks, packed rows, the sharded
adapter as it is saved. The reference has one process, plain linears with the dequantized weights,
and each document by itself."""

import traceback
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoConfig

from tests.support.built_models import built_model
from tests.support.families import FAMILIES, VOCAB, tiny_family
from tests.support.gathering import all_full
from tests.support.models import quantized
from tests.support.plans import make_plan
from tests.support.rounding import allowed, lost
from tests.support.stock_training import save_run
from tests.support.token_arrays import token_arrays
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import expert_stacks
from workflow.lib.checkpoints.files.stack_names import StackNames
from workflow.lib.checkpoints.meta_model import auto_class
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.world import World
from workflow.lib.export.adapter_files import (
    merged_model,
    read_sharded_adapter,
    save_adapter,
    write_merged,
)
from workflow.lib.export.packed_stacks import adapted_paths, exported_config
from workflow.lib.kernels.nf4.decode import decoded
from workflow.lib.model import prepared_decoder
from workflow.lib.model.backends import resolve_attention, resolve_training_attention
from workflow.lib.model.documents import Documents, documents_of
from workflow.lib.model.layers.lora_linear import VALUES, FusedLoraLinear
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.nf4_model import local, local_range, read_specs, say_quantized_
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.settings.config import ExportConfig, LoraSettings, RunConfig, TrainConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json, short_hash
from workflow.lib.training.batches import stored_batch
from workflow.lib.training.startup_checks import check_attention, startup_checks

CPU = torch.device("cpu")
LOSS = 2e-5  # a sum of 60 tokens; stock code in fp32 loses up to 3e-7
SEQ_LEN = 23
LENGTHS = {
    "packed": [[9, 6, 8], [23], [3, 19, 1], [2, 2, 17, 2]],
    "unpacked": [[23], [23], [23], [23]],
}
"""Tokens of the documents of each row: longer and shorter than convolutions and windows."""


MICRO_BATCHES = {"packed": 4, "unpacked": 2}
"""Rows of one, if the processes have so many: packed rows at once, unpacked ones in several."""


def family_store(rows: str) -> TokenStore:
    """Return four rows of random tokens, 70% of them trained, in the documents of `LENGTHS`."""
    draw = np.random.default_rng(5)
    lengths = LENGTHS[rows]
    positions = np.array([np.concatenate([np.arange(n) for n in row]) for row in lengths])
    ids = draw.integers(3, VOCAB, size=positions.shape)
    mask = (draw.random(ids.shape) < 0.7) & (positions > 0)
    document = draw.integers(3, VOCAB, size=13, dtype=np.uint32)
    heldout = (document, np.arange(13) > 0, np.array([0, 13]))
    rows_ = (ids.astype(np.uint32), mask, positions.astype(np.int32))
    arrays = token_arrays(*rows_, heldout=heldout)
    return TokenStore(manifest={"seq_len": SEQ_LEN, "vocab_size": VOCAB}, arrays=arrays)


def attention_of(folder: Path) -> str:
    """Return what `model.attention: auto` means in training the model in `folder` on a CPU."""
    needs = Checkpoint(folder).attention_needs
    return resolve_training_attention("auto", CPU, needs, compute_dtype=torch.float32).name


def stock_attention(folder: Path) -> str:
    return resolve_attention("auto", CPU, Checkpoint(folder).attention_needs)


def make_bases(folder: Path, families: Iterable[str]) -> Path:
    """Save and quantize the tiny models of families; return `folder`."""
    for family in families:
        quantized(tiny_family(family, folder / family / "original"), folder / family / "nf4")
    return folder


def run_families(
    world: World,
    folder: Path,
    target: str | None,
    families: Sequence[str],
    *,
    fused: bool = True,
    break_checks: bool = False,
) -> dict[str, Any]:
    """Compute losses and gradients of families in this group of processes, the gradients on its
    first process, and leave the adapter in `target` beside the base, if it has a name. A family
    that fails gives its traceback in their place.

    break_checks: also return what the start-up check says of broken models, and what linears share.
    """
    found = {}
    for family in families:
        try:
            number = [*FAMILIES].index(family)
            found[family] = run_family(
                folder / family, world, target,
                fused=fused, break_checks=break_checks, number=number,
            )  # fmt: skip
        except Exception:
            found[family] = traceback.format_exc()
    return found


def run_family(
    folder: Path, world: World, target: str | None, *, fused: bool, break_checks: bool, number: int
) -> dict[str, Any]:
    """Return one family's losses and gradients by kind of rows, and its start-up checks; number:
    decides the levers of memory."""
    base = folder / "nf4"
    config = RunConfig(
        lora=LoraSettings(r=3), train=TrainConfig(global_batch_size=4, fused_layers=fused)
    )
    plan = make_plan(
        activation_checkpointing=2,
        offload_embedding=number % 2 == 0,
        offload_activations=number % 2 == 1,
        offload_window_bytes=(None, 4096)[number % 2],
        offload_layers=number % 3 % 2,
    )
    model = built_model(base, config, plan, world, attention=attention_of(base))
    randomize_(model.training)
    packed = family_store("packed")
    checks = startup_checks(model, packed, Checkpoint(base), world)
    broken = said_of_broken(model.training, world) if break_checks else {}
    found = {
        rows: _gradients(model.training, family_store(rows), world, micro_batch=size)
        for rows, size in MICRO_BATCHES.items()
    }
    _gather_(found, world)
    if target is not None:
        save_run(model, folder / target, packed, world)
    if break_checks:
        found["shared"] = shared_values(model.training)
    return {
        "checks": [check.passed for check in checks],
        "details": [check.detail for check in checks],
        "broken": broken,
        "fused": dict(model.fused),
        **found,
    }


def said_of_broken(training: CausalLMForTraining, world: World) -> dict[str, str]:
    """Return what the start-up check says, nothing if it passes, of positions that run through the
    row, and of recurrent layers that take a row for a document."""
    whole = prepared_decoder.decoder_inputs

    def joined(attention: str, ids: torch.Tensor, *args: Any) -> dict[str, Any]:
        return whole(attention, ids, torch.arange(ids.shape[1]).expand_as(ids), None)

    with patch.object(prepared_decoder, "decoder_inputs", joined):
        said = {f"joined, {rows}": _said(training, rows, world) for rows in LENGTHS}
    if training.recurrent_layers:
        with patch.object(prepared_decoder, "documents_in", rows_as_documents):
            said["states"] = _said(training, "packed", world)
    return said


def _said(training: CausalLMForTraining, rows: str, world: World) -> str:
    try:
        check_attention(training, family_store(rows), world)
    except UserError as error:
        return str(error)
    return ""


def rows_as_documents(position_ids: torch.Tensor) -> Documents:
    rows, tokens = position_ids.shape
    return documents_of([tokens] * rows)


def shared_values(training: CausalLMForTraining) -> tuple[int, bool]:
    """Return how many inputs linears share in a row, and whether all values of these are taken."""
    inputs = []
    for layer in training.modules():
        if isinstance(layer, FusedLoraLinear) and layer.beside is not None:
            layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    training.train()
    training(stored_batch(family_store("unpacked"), np.arange(1)))
    return len({id(x) for x in inputs}), all(not getattr(x, VALUES)[0] for x in inputs)


def _gather_(found: dict[str, Any], world: World) -> None:
    """Make the gradients of all kinds of rows whole, on the first process, by one collective."""
    whole = all_full(
        {f"{rows} {name}": g for rows, x in found.items() for name, g in x["gradients"].items()}
    )
    for rows, result in found.items():
        names = result["gradients"] if world.is_main else ()
        result["gradients"] = {name: whole[f"{rows} {name}"] for name in names}


@torch.no_grad()
def randomize_(training: torch.nn.Module) -> None:
    """Give every trained tensor values of its own, B too, the same for any number of processes."""
    for name, param in trainable_parameters(training).items():
        draw = torch.Generator().manual_seed(int(short_hash(name), 16) % 2**31)
        whole = 0.1 * torch.randn(param.shape, generator=draw)
        start, stop = local_range(param)
        local(param).copy_(whole[start:stop])


def _gradients(
    training: Any, store: TokenStore, world: World, *, micro_batch: int
) -> dict[str, Any]:
    training.train()
    total, num_rows = torch.zeros(()), len(store.input_ids)
    size = micro_batch if world.size == 1 else 2
    for first in range(0, num_rows, size * world.size):
        start = first + size * world.rank
        rows = np.arange(start, start + size) % num_rows
        loss = training(stored_batch(store, rows)) * float(start < num_rows)  # all have the same
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    params = trainable_parameters(training)
    gradients = {n: param.grad for n, param in params.items() if param.grad is not None}
    training.zero_grad()
    return {"loss": float(total), "gradients": gradients}


@cache
def original_of(folder: Path) -> Checkpoint:
    return Checkpoint(folder / "original")


@cache
def trained_adapter(run: Path) -> dict[str, torch.Tensor]:
    """Return the adapter in a run's folder by names in training; never change it."""
    return read_sharded_adapter(run / "adapter")


@cache
def names_of(run: Path) -> StackNames:
    """Return PEFT's names of the adapter in a run's folder."""
    return original_of(run.parent).names.peft(adapted_paths(trained_adapter(run)))


@cache
def exported(run: Path) -> Path:
    """Write the adapter of a run's folder as PEFT does; return its folder."""
    adapter, names = trained_adapter(run), names_of(run)
    original = original_of(run.parent)
    config = exported_config(read_json(run / "adapter_config.json"), original.names, adapter)
    tensors = {names.exported(name): tensor for name, tensor in adapter.items()}
    save_adapter(tensors, config, run / "exported")
    return run / "exported"


@torch.no_grad()
def merge(folder: Path, run: Path, target: Path, *, onto: str) -> None:
    """Write the merged model of a run, of linears and stacks of experts, to `target`; folder: has
    the `original` and its quantized `nf4`."""
    trained, config = trained_adapter(run), read_json(run / "adapter_config.json")
    original, base = original_of(folder), Checkpoint(folder / "nf4")
    tensors = merged_model(trained, config, original=original, base=base, onto=onto)
    write_merged(tensors, original, target, settings=ExportConfig())


def stock_model(folder: Path, adapter: Path) -> PeftModel:
    """Return stock Transformers' model with the dequantized weights of the base in `folder`, and
    stock PEFT's adapter on it."""
    config = AutoConfig.from_pretrained(folder / "original")
    model = auto_class(config).from_pretrained(
        folder / "original",
        dtype=torch.float32,
        attn_implementation=stock_attention(folder / "nf4"),
    )
    stacks = expert_stacks(model)
    say_quantized_(model)
    nf4 = Checkpoint(folder / "nf4")
    with nf4.stored() as stored, nf4.decoded() as reader, torch.no_grad():
        for path in read_specs(stored):
            weight = decoded(*reader.nf4_weight(f"{path}.weight"))
            if path in stacks:
                stored = weight.mT if stacks[path].transposed else weight
                model.get_parameter(path).copy_(stored)
            else:
                model.get_submodule(path).weight.copy_(weight)
    tuned = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return tuned.eval()  # the same as training: nothing is dropped


def in_float64(model: PeftModel) -> PeftModel:
    """Return a stock model that computes in fp64, but for what its family's code casts itself."""
    base = model.get_base_model()
    base.set_experts_implementation("eager")  # grouped matmuls have no fp64
    return model.double()


def difference_from_stock(ours: dict[str, Any], folder: Path) -> str:
    """Return what a family's run (`of-1` in its folder) has otherwise than its stock model in fp64
    by more than rounding, nothing if it is the same."""
    adapter, names = exported(folder / "of-1"), names_of(folder / "of-1")
    in_float32 = stock_model(folder, adapter)
    rounded = {rows: stock_gradients(in_float32, family_store(rows)) for rows in LENGTHS}
    exact = in_float64(in_float32)
    differences = {}
    for rows in LENGTHS:
        theirs = stock_gradients(exact, family_store(rows))
        gradients = {names.exported(n): x for n, x in ours[rows]["gradients"].items()}
        if gradients.keys() != theirs["gradients"].keys():
            return "other adapters have gradients"
        felt = {name: x for name, x in theirs["gradients"].items() if x.any()}
        share = allowed(lost(rounded[rows]["gradients"][name], x) for name, x in felt.items())
        worst = max(lost(gradients[name], x) for name, x in felt.items())
        off = abs(ours[rows]["loss"] / theirs["loss"] - 1)
        if off > LOSS or worst > share:
            differences[rows] = f"loss by {off:.1g}, a gradient by {worst:.1g} (of {share:.1g})"
    return ", ".join(f"{rows}: {difference}" for rows, difference in differences.items())


def stock_gradients(model: PeftModel, store: TokenStore) -> dict[str, Any]:
    """Return the summed loss and its gradients, documents of one length at a time."""
    total = torch.zeros(())
    for ids, mask in _documents(store):
        logits = model(input_ids=ids, use_cache=False).logits
        total = total + torch.nn.functional.cross_entropy(
            logits[:, :-1][mask[:, 1:]], ids[:, 1:][mask[:, 1:]], reduction="sum"
        )
    total.backward()
    params = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    gradients = {n: p.grad.detach().clone() for n, p in params.items() if p.grad is not None}
    model.zero_grad()
    return {"loss": float(total.detach()), "gradients": gradients}


def _documents(store: TokenStore) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ids and masks (documents, length) of the documents in the store's rows that have a
    trained token."""
    by_length = {}
    for ids, mask, positions in zip(
        store.input_ids, store.loss_mask, store.position_ids, strict=True
    ):
        starts = np.flatnonzero(positions == 0)
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            if mask[start:stop].any():
                one = (ids[start:stop].astype(np.int64), mask[start:stop])
                by_length.setdefault(stop - start, []).append(one)
    return [
        (torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(masks)))
        for ids, masks in (zip(*documents, strict=True) for documents in by_length.values())
    ]
