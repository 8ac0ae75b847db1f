"""A family's class tried on random values, with attributes of a module of a real model but
other weights: how fused operations find what a module computes, whatever its family calls it."""

import inspect

import torch
from torch import nn


def stand_in_for(module: nn.Module) -> nn.Module:
    """Return a module of the same class and attributes, without its parameters and children."""
    made = type(module).__new__(type(module))  # with the class's methods, which its forward calls
    nn.Module.__init__(made)
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "training":
            setattr(made, name, value)
    return made


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether a class's forward has one argument: an optional other one could change its value."""
    return len(inspect.signature(type(module).forward).parameters) == 2  # self is the first


@torch.no_grad()
def tried(stand_in: nn.Module, *given: torch.Tensor) -> torch.Tensor | None:
    """Return what a stand-in's forward gives; None: no tensor, other attributes or shapes."""
    try:
        output = type(stand_in).forward(stand_in, *given)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return output if isinstance(output, torch.Tensor) else None
