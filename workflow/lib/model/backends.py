"""Which device, data type and attention a model runs with, and why a faster one is left out.

Preflight, training and evaluation ask here, so that they decide alike."""

from pathlib import Path

import torch
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from workflow.lib.system.compute_choice import FLASH, VARLEN, automatic_attention, choose_dtype
from workflow.lib.system.errors import setting_error
from workflow.lib.system.files import read_json


def resolve_training_attention(
    name: str,
    device: torch.device,
    *,
    compute_dtype: torch.dtype,
    softcapped: bool,
    dropout: float = 0.0,
) -> str:
    """Return the implementation that `model.attention` means for training.

    softcapped: whether the model soft-caps its attention scores (Gemma 2); dropout: that of its
    attention weights. `auto` is flash_attention_2 where its package is, else varlen on a GPU in 16
    bits, else sdpa (eager for soft-capped scores). Raises `UserError` if an implementation asked
    for by name cannot run.
    """
    if name == VARLEN:
        if lack := _varlen_lack(device, compute_dtype, softcapped, dropout):
            raise setting_error("model.attention", name, lack, "Set it to auto")
        return VARLEN
    if name == "auto":
        return _automatic(
            device, compute_dtype, softcapped=softcapped, training=True, dropout=dropout
        )
    return resolve_attention(name, device, compute_dtype=compute_dtype, softcapped=softcapped)


def _varlen_lack(
    device: torch.device, compute_dtype: torch.dtype, softcapped: bool, dropout: float
) -> str | None:
    if device.type != "cuda":
        return f"it needs a GPU, and this runs on {device.type}"
    if compute_dtype == torch.float32:
        return "it computes in 16 bits, and compute_dtype is float32"
    if not has_bfloat16(device):
        return "it needs a GPU of compute capability 8.0 or more"
    if dropout > 0:
        return (
            f"it cannot drop attention weights, and this model's attention_dropout is {dropout:g}"
        )
    return "it cannot soft-cap attention scores, as this model does" if softcapped else None


FLASH_AVAILABLE = {
    FLASH: is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}


def choose_device() -> torch.device:
    """Return `cuda` (all visible GPUs, filled in order) where there is one, else `cpu`."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type that `model.compute_dtype` means: `auto` is bfloat16 on GPUs that have it,
    else float16, and float32 on CPUs.

    Raises `UserError` for float16 on a CPU, or bfloat16 on a GPU without it.
    """
    choice = choose_dtype(name, cuda=device.type == "cuda", bfloat16=has_bfloat16(device))
    dtype: torch.dtype = getattr(torch, choice)
    return dtype


def has_bfloat16(device: torch.device) -> bool:
    """Whether a GPU multiplies bfloat16 itself: compute capability 8.0 (PyTorch emulates it on
    older ones). Assumed of one that is not there.
    """
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def resolve_attention(
    name: str,
    device: torch.device,
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
    softcapped: bool = False,
) -> str:
    """Return the attention implementation that `model.attention` means for a stock model.

    `auto` (and `varlen`, which is for training) is flash_attention_2 where a GPU, the package and a
    16-bit `compute_dtype` are there, else sdpa; a model with soft-capped scores gets eager instead
    of sdpa. Raises `UserError` if an implementation asked for by name cannot run.
    """
    if name in ("auto", VARLEN):
        return _automatic(device, compute_dtype, softcapped=softcapped, training=False)
    lack = _flash_lack(name, device, compute_dtype)
    if name == "sdpa" and softcapped:
        lack = "it ignores the soft-capping of attention scores that this model has"
    if lack is not None:
        raise setting_error("model.attention", name, lack, "Set it to auto or eager")
    return name


def _automatic(
    device: torch.device,
    compute_dtype: torch.dtype,
    *,
    softcapped: bool,
    training: bool,
    dropout: float = 0.0,
) -> str:
    """What `auto` means on this device, with the packages that are installed."""
    cuda = device.type == "cuda"
    return automatic_attention(
        cuda=cuda,
        bfloat16=has_bfloat16(device),
        compute_dtype=str(compute_dtype).removeprefix("torch."),
        flash_package=cuda and FLASH_AVAILABLE[FLASH](),
        softcapped=softcapped,
        training=training,
        dropout=dropout,
    )


def _flash_lack(name: str, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """What a flash attention implementation lacks here; None for nothing, or for another
    implementation.
    """
    if name not in FLASH_AVAILABLE:
        return None
    if device.type != "cuda":
        return f"it needs a GPU, and this runs on {device.type}"
    if compute_dtype == torch.float32:
        return "it computes in 16 bits, and compute_dtype is float32"
    if not has_bfloat16(device):
        return "it needs a GPU of compute capability 8.0 or more"
    return None if FLASH_AVAILABLE[name]() else "its package is not installed"


def softcaps_attention(folder: Path) -> bool:
    """Tell whether the model in `folder` soft-caps its attention scores (Gemma 2), which sdpa would
    ignore.
    """
    return read_json(folder / "config.json").get("attn_logit_softcapping") is not None


def attention_dropout(folder: Path) -> float:
    """Return the share of attention weights that the model in `folder` drops in training."""
    return float(read_json(folder / "config.json").get("attention_dropout") or 0.0)
