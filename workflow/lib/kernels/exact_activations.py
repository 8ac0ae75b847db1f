"""Activations that are never rounded between forward and backward (`rounded_activations`).

What marks them is noted on their memory: autograd saves other tensors of it than a layer has."""

import torch

EXACT = "workflow_exact"  # attribute of the memory of tensors


def keep_exact(*tensors: torch.Tensor) -> None:
    """Have these tensors, and all views of them, come back from forward as they are."""
    for tensor in tensors:
        setattr(tensor.untyped_storage(), EXACT, True)


def is_exact(tensor: torch.Tensor) -> bool:
    """Whether the tensor was named to `keep_exact`, or is a view of one that was."""
    return hasattr(tensor.untyped_storage(), EXACT)
