"""Sharding over the processes of a run (`world`), applied to a finished model from outside.

Every decoder layer is an FSDP2 unit, the rest is another; embedding and head are sliced by rows
(`vocabulary_parallel`), and `packed_layers` gathers packed weights of decoder layers. A single
process is not sharded. With replicas (HSDP) gradients are also summed over the groups.

Frozen packed data are float32 views (see `frozen_linear`). Gradients are summed, not averaged: the
loss is divided by the global number of trained tokens. Adapters are float32 masters, which decoder
layers gather in the compute dtype, with gradients in float32."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from transformers import PreTrainedModel

from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.distributed.vocabulary_parallel import share_vocabulary_
from workflow.lib.model.training_module import CausalLMForTraining

# State of a running forward or backward, and its values between micro-batches, by owner. torch 2.11
# keeps one reduce-scatter, later ones a list, so not all have every name.
COMMUNICATION = {"all_gather_state": None, "reduce_scatter_state": None}
ITERATION = {"iter_forward_root": None, "post_backward_final_callback_queued": False}
GROUP = {
    "_training_state": TrainingState.IDLE,
    "_all_gather_result": None,
    "_post_reduce_event": None,
    "_all_reduce_state": None,
    "_reshard_after_forward_event": None,
    "_partial_reduce_output": None,
}
COLLECTIONS = (
    "reduce_scatter_states",
    "_last_post_reduce_events",
    "post_forward_order",
    "_modules_to_run_forward",
    "_post_forward_indices",
)


def shard_(
    training: CausalLMForTraining,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    ignored: set[nn.Parameter] | None = None,
) -> list[FSDPModule]:
    """Shard parameters over `mesh`; return the FSDP units, inner ones first. Collective; on a meta
    model. reshard_after_forward: free weights after forward (FULL_SHARD). ignored: parameters to
    leave alone (`packed_layers`)."""
    model: PreTrainedModel = training.peft_model.get_base_model()  # type: ignore[operator]
    if training.router_balance is not None:
        assert dist.group.WORLD is not None
        training.router_balance.share_(dist.group.WORLD)
    sliced = share_vocabulary_(training, mesh)
    layers = decoder_layers(model)
    compute_dtype = model.config.dtype
    assert isinstance(compute_dtype, torch.dtype), "the model was built in one"
    policy = _gathered_in(compute_dtype, layers)
    units: list[FSDPModule] = [
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            ignored_params=ignored,
        )
        for layer in layers
    ]
    for layer in layers:
        _keep_gradients_float32_(layer)
    units.append(
        fully_shard(training, mesh=mesh, reshard_after_forward=False, ignored_params=sliced)
    )
    # By default FSDP gathers for `forward` alone.
    methods = ("logits", "family_logits", "hidden_states", "family_hidden_states", "trained_states")
    for method in methods:
        register_fsdp_forward_method(training, method)
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # plain SUM: gloo has no pre-multiplied one
    return units


def _gathered_in(dtype: torch.dtype, layers: Iterable[nn.Module]) -> MixedPrecisionPolicy:
    """Return the policy by which decoder layers gather in `dtype`, the compute dtype. DoRA's
    magnitudes need float32: with any of them all parameters keep their dtype."""
    names = (name for layer in layers for name, _ in layer.named_parameters())
    if any(".lora_magnitude_vector." in name for name in names):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _keep_gradients_float32_(layer: nn.Module) -> None:
    """Let a layer's gathered parameters of any dtype take float32 gradients. FSDP2 makes these
    parameters in the layer's first forward, and reuses them."""

    def begin(layer: nn.Module, _: object) -> None:
        for param in layer.parameters():
            if param.requires_grad:
                param.grad_dtype = torch.float32
        handle.remove()

    handle = layer.register_forward_pre_hook(begin)


def shard_for_inference_(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard a whole model with its adapters, each forward gathered. Collective; on meta."""
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:  # a tied weight must stay in one unit, the root
        fully_shard(embedding, mesh=mesh, reshard_after_forward=True)
        fully_shard(head, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


@contextmanager
def forward_only(training: CausalLMForTraining) -> Iterator[None]:
    """Within the block forward keeps nothing for backward. After it a process holds only its
    shards, which FSDP2 would leave to backward."""
    with torch.no_grad():
        yield
    for module in training.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    if training.packed_layers is not None:
        training.packed_layers.free()


def abandon_micro_batch_(training: CausalLMForTraining) -> None:
    """Reset all units to their state between two micro-batches, after an aborted capture; gradients
    existed before. FSDP2 would finish in a backward that never comes, and wait for events of the
    capture, which is an error (also torch 2.13's reset). Nothing has run here."""
    for module in training.modules():
        if isinstance(module, FSDPModule):
            _abandon_(module._get_fsdp_state())
    if training.packed_layers is not None:
        training.packed_layers.abandon()


def _abandon_(state: Any) -> None:
    _set_(state, {"_training_state": TrainingState.IDLE})
    _set_(state._comm_ctx, COMMUNICATION)
    _set_(state._state_ctx, ITERATION)
    group = state._fsdp_param_group
    if group is None:  # a unit without parameters
        return
    _set_(group, GROUP)
    group._to_sharded()
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        gathered = getattr(param, "unsharded_param", None)  # absent before its first use
        if gathered is not None:
            gathered.grad = None


def _set_(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(owner, name):
            setattr(owner, name, value)
    for name in COLLECTIONS:
        if hasattr(owner, name):
            getattr(owner, name).clear()
