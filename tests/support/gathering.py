"""Sharded tensors made whole, for comparisons."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from workflow.lib.model.nf4_model import local


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return a copy of a tensor, whole. Collective."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def all_full(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Return copies of tensors, whole, by one collective: one for each takes seconds for a model.

    Each is made of the slices of this process's copy."""
    slices = [{}] * dist.get_world_size()
    own = {name: local(x.detach()).cpu() for name, x in tensors.items() if x is not None}
    assert own.keys() == tensors.keys()
    dist.all_gather_object(slices, own)
    found = {}
    for name, tensor in tensors.items():
        ranks = [dist.get_rank()]
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            ranks = mesh.mesh[tuple(mesh.get_coordinate()[:-1])].tolist()
        found[name] = torch.cat([slices[rank][name] for rank in ranks]).to(tensor.device)
    return found
