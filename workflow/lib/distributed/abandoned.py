"""FSDP2's units after a micro-batch that broke off while it was captured.

FSDP2 finishes what a forward has begun in the backward that follows. Where none follows, the next
forward takes up weights that were never gathered, and waits for events of the capture, which is an
error. torch 2.13 can begin anew after any error, but it waits for these events, too. Here nothing
has run on the device, so there is nothing to wait for.
"""

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from workflow.lib.model.training_module import CausalLMForTraining

# What a forward or backward under way leaves, and what stands there between micro-batches, by
# owner. torch 2.11 keeps one reduce-scatter, later ones a list of them, so not all have every name.
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


def abandon_micro_batch_(training: CausalLMForTraining) -> None:
    """Put all units of a model back to where they are between two micro-batches, shards alone. Its
    gradients must have been there before the one that is abandoned.
    """
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
        gathered = getattr(param, "unsharded_param", None)  # not there until it has been once
        if gathered is not None:
            gathered.grad = None


def _set_(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(owner, name):
            setattr(owner, name, value)
    for name in COLLECTIONS:
        if hasattr(owner, name):
            getattr(owner, name).clear()
