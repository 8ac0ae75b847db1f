"""The table of ops, with all modules that fill it."""

import importlib
import pkgutil
from typing import Any

import torch

from workflow.lib import kernels
from workflow.lib.kernels.loss.fused_logits import LogitForm
from workflow.lib.kernels.op import OPS, Op
from workflow.lib.quantization import calibrated_rounding as calibrated_rounding

# What kernels are compiled for beside the dtype, for those that are compiled for more.
BESIDE_DTYPE: dict[str, tuple[tuple[Any, ...], ...]] = {
    "attention within documents": ((128,), (320,)),
    "gates of experts": (("silu",), ("clamped",)),
    "gates of feed-forwards": (("silu",), ("gelu_tanh",)),
    "gradients of gates": (("silu",), ("gelu_tanh",)),
    "gradients of gates of experts": (("gelu_tanh",), ("clamped",)),
    "gradients of gates with row lengths": (("silu",),),
    "gated norms": ((False,), (True,)),
    "rotary positions": ((False,), (True,)),
    "the gated delta rule": ((16, 32, 2),),
    "the loss": ((LogitForm(0.5, None),), (LogitForm(1.0, 5.0),)),
    "the state space of Mamba 2": ((2, 16, 16),),
}
OF_NO_DTYPE = {"calibrated rounding", "scales of weights' rows"}

IN_FLOAT8 = {"columns of weights in float8", "rounding to float8", "rows of weights in float8"}


def all_ops() -> dict[str, Op[Any, Any]]:
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if "triton_code" not in module.name:
            importlib.import_module(module.name)
    return OPS


def variants_in(name: str, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    if name in OF_NO_DTYPE:
        return [()]
    return [(dtype, *beside) for beside in BESIDE_DTYPE.get(name, ((),))]


def variants_in_fp32(name: str) -> list[tuple[Any, ...]]:
    return variants_in(name, torch.float32)
