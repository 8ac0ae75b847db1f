"""Sharding over the processes of a run (`world`), applied to a finished model from outside.

`shard_` is the one place that decides what is shared and
how: every decoder layer is an FSDP2 unit, the rest is another, and embedding and head are sliced by rows of the
vocabulary (`vocabulary`) and never gathered. One process is not sharded at all.

With several replicas (HSDP) each group of `shard_size` processes shards a copy of its own, and gradients are summed
over the groups too.

FSDP2 is used as it is: all frozen packed data are float32 views (see `nf4`), no mixed-precision policy is set, and
gradients are summed, not averaged, because the loss is already divided by the global number of trained tokens.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from workflow.lib.errors import UserError
from workflow.lib.loss import CausalLMForTraining
from workflow.lib.model import (
    checkpoint_name,
    local,
    local_range,
    plain_parameters,
    read_bytes,
    stored_buffers,
)
from workflow.lib.nf4 import NF4Linear, nf4_linears
from workflow.lib.slices import vocabulary_slices
from workflow.lib.vocabulary import share_vocabulary_
from workflow.lib.weights import CheckpointReader
from workflow.lib.world import World


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks, found by the class names in Transformers' `_no_split_modules`."""
    names = set(model._no_split_modules or ())
    layers = [
        m for m in model.modules() if type(m).__name__ in names and not isinstance(m, nn.Embedding)
    ]
    if not layers:
        raise UserError(
            f"{type(model).__name__} names no decoder layer class (_no_split_modules): this model family "
            "cannot be sharded. Choose another model.source."
        )
    return layers


def checkpoint_activations_(model: PreTrainedModel, *, every: int) -> None:
    """Recompute decoder layers 0, `every`, 2 x `every`, ... in backward, by Transformers' own switch (non-reentrant).

    The state of the random numbers is kept for it where any may be drawn.
    """
    # renamed in Transformers 5.2x; the old name warns there and will go in v6
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False, "preserve_rng_state": _may_draw(model)})
    for number, layer in enumerate(decoder_layers(model)):
        setattr(layer, "gradient_checkpointing", number % every == 0)  # noqa: B010


def _may_draw(model: PreTrainedModel) -> bool:
    """Whether a layer drops anything by chance: by a module, or by what its configuration says."""
    modules = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
    return modules or _drops(model.config.to_dict())


def _drops(config: dict[str, Any]) -> bool:
    """Whether a configuration, or one within it, has a share of anything to drop."""
    return any(
        _drops(value) if isinstance(value, dict) else "drop" in str(key) and value not in (None, 0)
        for key, value in config.items()
    )


def shard_(
    training: CausalLMForTraining,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    ignored: set[nn.Parameter] | None = None,
) -> list[FSDPModule]:
    """Shard parameters over `mesh`; return the FSDP units, inner ones first. Collective; call on a meta-device model.

    `reshard_after_forward`: free gathered weights after forward (FULL_SHARD), or keep them to backward. ignored:
    parameters of decoder layers to leave as they are (`hosted`).
    """
    model: PreTrainedModel = training.peft_model.get_base_model()  # type: ignore[operator]
    sliced = share_vocabulary_(training, mesh)
    units: list[FSDPModule] = [
        fully_shard(
            layer, mesh=mesh, reshard_after_forward=reshard_after_forward, ignored_params=ignored
        )
        for layer in decoder_layers(model)
    ]
    units.append(
        fully_shard(training, mesh=mesh, reshard_after_forward=False, ignored_params=sliced)
    )
    register_fsdp_forward_method(training, "family_logits")
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # plain SUM: gloo has no pre-multiplied one
    return units


def shard_for_inference_(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard a whole Transformers model over `mesh`, adapters in it too; weights are freed after each unit's forward.

    Collective; call on a meta-device model. Every forward gathers all weights once, unit by unit.
    """
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:  # a tied weight must stay in one unit: the root
        fully_shard(embedding, mesh=mesh, reshard_after_forward=True)
        fully_shard(head, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def local_bytes(training: nn.Module) -> tuple[int, int]:
    """Return the bytes of all parameters that this process holds, and of the whole model."""
    unique = {id(p): p for p in training.parameters()}.values()
    held = sum(local(p).numel() * p.element_size() for p in unique)
    return held, sum(p.numel() * p.element_size() for p in unique)


def fair_share(training: CausalLMForTraining, *, shards: int) -> float:
    """Return the bytes that each of `shards` processes with one copy of the model should hold of it, but for uneven cuts."""
    sliced = {id(p): p for p in _vocabulary_parameters(training)}.values()
    tables = sum(p.numel() * p.element_size() for p in sliced)
    _, total = local_bytes(training)
    return (total - tables) / shards + tables / vocabulary_slices(shards)


def _vocabulary_parameters(training: CausalLMForTraining) -> list[nn.Parameter]:
    """Return the parameters of embedding and head, a tied one twice."""
    model: PreTrainedModel = training.peft_model.get_base_model()  # type: ignore[operator]
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return [p for table in tables for p in table.parameters()]


@torch.no_grad()
def mismatched_tensors(
    training: CausalLMForTraining,
    units: list[FSDPModule],
    reader: CheckpointReader,
    world: World,
    *,
    moved: Callable[[], None] = lambda: None,
) -> list[str]:
    """Gather every unit through FSDP and compare it bit by bit with the checkpoint; return the tensors that differ.

    Unit i is compared on rank i mod world size, and each process's slices of the vocabulary by itself, so the checkpoint is
    read about once in total. Calls `moved` after each. Collective; FSDP must have run a forward. Without units (one process) the whole model is compared.
    """
    model: PreTrainedModel = training.peft_model.get_base_model()  # type: ignore[operator]
    if not units:
        return _differences(model, reader)
    wrong = _different_slices(training, reader)
    for number, unit in enumerate(units):
        unit.unshard()
        if number % world.size == world.rank:
            wrong += _differences(model, reader)
        unit.reshard()
        moved()
    return everyones(wrong, world)


def everyones(names: list[str], world: World) -> list[str]:
    """Return the names that any process has, sorted. Collective."""
    everyone: list[list[str]] = [[] for _ in range(world.size)]
    dist.all_gather_object(everyone, names, group=world.io_group)
    return sorted(set(chain.from_iterable(everyone)))


def _differences(model: PreTrainedModel, reader: CheckpointReader) -> list[str]:
    """Compare all parameters that are whole at this moment (gathered, or never sharded) with the checkpoint."""
    wrong = []
    for path, linear in nf4_linears(model):
        wrong += different_parts(linear, checkpoint_name(path), reader)
    for name, tensor in [*plain_parameters(model), *stored_buffers(model)]:
        if type(tensor.data) is not torch.Tensor or not tensor.numel():
            continue  # without elements: its rows are looked up in the checkpoint itself
        stored = reader.tensor(checkpoint_name(name)).to(tensor.dtype)
        if not _same_bytes(tensor.data.cpu(), stored):
            wrong.append(checkpoint_name(name))
    return wrong


def different_parts(linear: NF4Linear, path: str, reader: CheckpointReader) -> list[str]:
    """Compare the packed parameters of a linear that are whole at this moment with the checkpoint; return those that differ.

    Ones without elements wait elsewhere (`hosted`) and are left out. path: of the linear in the checkpoint.
    """
    wrong = []
    for part, size in linear.spec.sizes.items():
        held = linear.get_parameter(part)
        if type(held.data) is not torch.Tensor or not held.numel():
            continue
        stored = read_bytes(linear, part, path, reader, start=0, stop=size)
        if not torch.equal(held.data.view(torch.uint8)[:size].cpu(), stored):
            wrong.append(f"{path}.{part}")
    return wrong


def _different_slices(training: CausalLMForTraining, reader: CheckpointReader) -> list[str]:
    """Compare this process's slices of embedding and head, which are never gathered, with the checkpoint."""
    model: PreTrainedModel = training.peft_model.get_base_model()  # type: ignore[operator]
    sliced = set(map(id, _vocabulary_parameters(training)))
    wrong = []
    for name, param in plain_parameters(model):
        if id(param) in sliced:
            stored = reader.rows(checkpoint_name(name), *local_range(param)).to(param.dtype)
            if not _same_bytes(local(param).cpu(), stored):
                wrong.append(checkpoint_name(name))
    return wrong


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare shapes and bytes: NaN equals itself, and 0 is not -0."""
    views = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and torch.equal(*views)
