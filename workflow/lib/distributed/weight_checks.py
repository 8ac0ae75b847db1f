"""Proof at start that gathered weights are the checkpoint's, byte by byte."""

from itertools import chain

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.distributed.world import World
from workflow.lib.model.layers.frozen_linear import FrozenLinear, frozen_linears
from workflow.lib.model.lora import write_rows_
from workflow.lib.model.loss.vocabulary_slices import vocabulary_slices
from workflow.lib.model.nf4_model import (
    checkpoint_name,
    local,
    local_range,
    plain_parameters,
    stored_buffers,
)
from workflow.lib.model.training_module import CausalLMForTraining


def local_bytes(training: nn.Module) -> tuple[int, int]:
    """Return the bytes of all parameters that this process holds, and of the whole model."""
    unique = {id(p): p for p in training.parameters()}.values()
    local_total = sum(local(p).numel() * p.element_size() for p in unique)
    return local_total, sum(p.numel() * p.element_size() for p in unique)


def fair_share(training: CausalLMForTraining, *, shards: int) -> float:
    """Return the bytes of a copy that each of `shards` processes should hold, if cut evenly."""
    sliced = {id(p): p for p in _vocabulary_parameters(training)}.values()
    tables = sum(p.numel() * p.element_size() for p in sliced)
    _, total = local_bytes(training)
    return (total - tables) / shards + tables / vocabulary_slices(shards)


def _vocabulary_parameters(training: CausalLMForTraining) -> list[nn.Parameter]:
    model: PreTrainedModel = training.peft_model.get_base_model()  # type: ignore[operator]
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return [p for table in tables for p in table.parameters(recurse=False)]


@torch.no_grad()
def mismatched_tensors(
    training: CausalLMForTraining,
    units: list[FSDPModule],
    reader: CheckpointReader,
    world: World,
    *,
    masters: bool = True,
) -> list[str]:
    """Gather every unit through FSDP and compare it bit by bit with the checkpoint, on one rank
    each, and slices of the vocabulary locally; return differing tensors. masters: also those of
    weights that are trained whole, which begin as the checkpoint's or as an adapter's.
    Collective, after a forward. One process: the whole model."""
    model: PreTrainedModel = training.peft_model.get_base_model()  # type: ignore[operator]
    write_rows_(model, base=True)
    if not units:
        return _differences(model, reader, masters)
    wrong = _different_slices(training, reader, masters)
    for number, unit in enumerate(units):
        unit.unshard()  # all gather, in the same order, also processes that compare nothing
        if number % world.size == world.rank:
            wrong += _differences(model, reader, masters)
        unit.reshard()
        world.moved()
    return names_of_all(wrong, world)


def names_of_all(names: list[str], world: World) -> list[str]:
    """Return the names of all processes, sorted. Collective."""
    return sorted(set(chain.from_iterable(world.gathered(names))))


def _differences(model: PreTrainedModel, reader: CheckpointReader, masters: bool) -> list[str]:
    """Compare all whole parameters (gathered, or never sharded) with the checkpoint."""
    wrong = []
    for path, linear in frozen_linears(model):
        wrong += different_parts(linear, checkpoint_name(path), reader)
    for name, tensor in [*plain_parameters(model), *stored_buffers(model)]:
        if type(tensor.data) is not torch.Tensor or not tensor.numel():
            continue  # without elements: rows are looked up in the checkpoint itself
        if tensor.requires_grad and not masters:
            continue
        stored = reader.tensor(checkpoint_name(name)).to(tensor.dtype)
        if not _same_bytes(tensor.data.cpu(), stored):
            wrong.append(checkpoint_name(name))
    return wrong


def different_parts(linear: FrozenLinear, path: str, reader: CheckpointReader) -> list[str]:
    """Compare the packed parameters of a linear (`path` in the checkpoint) that are whole now;
    return differing ones. Empty ones are not gathered (`packed_layers`)."""
    wrong = []
    for part, size in linear.spec.sizes.items():
        packed = linear.get_parameter(part)
        if type(packed.data) is not torch.Tensor or not packed.numel():
            continue
        stored = linear.spec.read_bytes(part, path, reader, start=0, stop=size)
        if not torch.equal(packed.data.view(torch.uint8)[:size].cpu(), stored):
            wrong.append(f"{path}.{part}")
    return wrong


def _different_slices(
    training: CausalLMForTraining, reader: CheckpointReader, masters: bool
) -> list[str]:
    """Compare this process's slices of embedding and head with the checkpoint."""
    model: PreTrainedModel = training.peft_model.get_base_model()  # type: ignore[operator]
    sliced = set(map(id, _vocabulary_parameters(training)))
    wrong = []
    for name, param in plain_parameters(model):
        if id(param) in sliced and (masters or not param.requires_grad):
            stored = reader.rows(checkpoint_name(name), *local_range(param)).to(param.dtype)
            if not _same_bytes(local(param).cpu(), stored):
                wrong.append(checkpoint_name(name))
    return wrong


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare shapes and bytes: NaN equals itself, and 0 is not -0."""
    views = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and torch.equal(*views)
