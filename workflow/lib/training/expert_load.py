"""Which experts of a mixture the tokens of a run went to."""

import torch
import torch.distributed as dist
from torch import nn

from workflow.lib.artifacts.training_record import ExpertLoad
from workflow.lib.distributed.world import World
from workflow.lib.model.experts.fused_experts import FusedExperts


def routed_rows(model: nn.Module, world: World) -> list[torch.Tensor]:
    """Return the rows (experts,) int64 on the CPU that each expert got in training, over all
    processes, by layer. Collective. Recomputed layers count twice: right within a layer."""
    counts = []
    for experts in _experts(model):
        routed = experts.routed if experts.routed_before is None else experts.routed_before
        own = torch.zeros(experts.num_experts, dtype=torch.int64) if routed is None else routed
        counts.append(own.cpu().clone())
    for layer in counts:
        dist.all_reduce(layer, group=world.io_group)
    return counts


@torch.no_grad()
def note_finished_steps_(model: nn.Module, *, more_follows: bool) -> None:
    """Have `routed_rows` count what has run until now, and if `more_follows` nothing of what runs
    until this is called again: that belongs to a step which is not finished."""
    for experts in _experts(model):
        routed = experts.routed if more_follows else None
        experts.routed_before = None if routed is None else routed.clone()


def restore_routed_rows_(model: nn.Module, rows: list[torch.Tensor], world: World) -> None:
    """Have `routed_rows` count on from what it returned when a checkpoint was saved."""
    for experts, saved in zip(_experts(model), rows, strict=True):
        experts.routed = saved.to(world.device) if world.is_main else None


def _experts(model: nn.Module) -> list[FusedExperts]:
    return [module for module in model.modules() if isinstance(module, FusedExperts)]


def expert_load(model: nn.Module, world: World) -> ExpertLoad | None:
    """Return how evenly the tokens went to the experts; None of a model without. Collective."""
    layers = routed_rows(model, world)
    if not layers:
        return None
    return ExpertLoad(
        layers=len(layers),
        experts=sum(map(len, layers)),
        without_tokens=sum(int((layer == 0).sum()) for layer in layers),
        busiest=max(float(layer.max() / layer.double().mean()) for layer in layers),
    )
