"""Device, dtype and attention of a model, and the reason why a faster one is not used.

Preflight, training and evaluation call this module, so they decide alike."""

from functools import partial

import torch
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from workflow.lib.kernels.attention import document_attention
from workflow.lib.kernels.attention.attention_choice import (
    BY_SETTING,
    FLASH,
    FLEX,
    VARLEN,
    WIDEST_HEAD,
    AttentionChoice,
    AttentionNeeds,
    attention_obstacle,
    automatic_attention,
)
from workflow.lib.system.dtype_choice import MatmulHardware, choose_dtype, choose_matmul_dtype
from workflow.lib.system.errors import setting_error


def resolve_training_attention(
    name: str, device: torch.device, needs: AttentionNeeds, *, compute_dtype: torch.dtype
) -> AttentionChoice:
    """Return training's attention by `model.attention`, with its reason; raises `UserError`."""
    if name == "auto":
        return _automatic(device, compute_dtype, needs, training=True)
    if name not in (VARLEN, FLEX):
        stock = resolve_attention(name, device, needs, compute_dtype=compute_dtype)
        return AttentionChoice(stock, BY_SETTING)
    check = _varlen_obstacle if name == VARLEN else partial(_obstacle, FLEX)
    obstacle = check(device, compute_dtype, needs)
    if obstacle is not None:
        raise setting_error("model.attention", name, obstacle, "Set it to auto")
    return AttentionChoice(name, BY_SETTING)


def _varlen_obstacle(
    device: torch.device, compute_dtype: torch.dtype, needs: AttentionNeeds
) -> str | None:
    obstacle = _obstacle(VARLEN, device, compute_dtype, needs)
    if obstacle is None and not _wide_heads(device, compute_dtype, needs):
        return f"its kernels for heads {needs.head_dim} wide cannot be built here (see the log)"
    return obstacle


def _obstacle(
    name: str, device: torch.device, compute_dtype: torch.dtype, needs: AttentionNeeds
) -> str | None:
    """Return why an implementation cannot run on this device with the installed packages."""
    obstacle = attention_obstacle(
        name,
        needs,
        cuda=device.type == "cuda",
        bfloat16=has_bfloat16(device),
        compute_dtype=str(compute_dtype).removeprefix("torch."),
    )
    if obstacle is None and name in FLASH_AVAILABLE and not FLASH_AVAILABLE[name]():
        return "its package is not installed"
    return obstacle


def _wide_heads(device: torch.device, compute_dtype: torch.dtype, needs: AttentionNeeds) -> bool:
    """Whether varlen supports the model's head width on this GPU, or on an absent one."""
    if needs.head_dim <= WIDEST_HEAD or not torch.cuda.is_available():
        return True
    return document_attention.usable(device, compute_dtype, needs.head_dim)


NO_NEEDS = AttentionNeeds()
FLASH_AVAILABLE = {FLASH: is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}


def choose_device() -> torch.device:
    """Return `cuda` (all visible GPUs, filled in order) where there is one, else `cpu`."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of `model.compute_dtype`; raises as `dtype_choice.choose_dtype` does."""
    choice = choose_dtype(name, cuda=device.type == "cuda", bfloat16=has_bfloat16(device))
    dtype: torch.dtype = getattr(torch, choice)
    return dtype


def resolve_matmul_dtype(name: str, device: torch.device, *, compute_dtype: torch.dtype) -> str:
    """Return the dtype of `train.matmul_dtype` here; raises as `choose_matmul_dtype` does."""
    dtype = str(compute_dtype).removeprefix("torch.")
    return choose_matmul_dtype(name, matmul_hardware(device), compute_dtype=dtype)


def matmul_hardware(device: torch.device) -> MatmulHardware:
    """Return the 8-bit matmuls of this device."""
    capability = (0, 0)
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
    return MatmulHardware(device.type == "cuda", capability >= (8, 9))


def has_bfloat16(device: torch.device) -> bool:
    """Whether a GPU multiplies bfloat16 itself (capability 8.0); assumed of an absent one."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def resolve_attention(
    name: str,
    device: torch.device,
    needs: AttentionNeeds = NO_NEEDS,
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> str:
    """Return the attention of `model.attention` for a stock model; raises `UserError`."""
    if name in ("auto", VARLEN, FLEX):
        return _automatic(device, compute_dtype, needs, training=False).name
    obstacle = _obstacle(name, device, compute_dtype, needs)
    if obstacle is not None:
        raise setting_error("model.attention", name, obstacle, "Set it to auto or eager")
    return name


def _automatic(
    device: torch.device, compute_dtype: torch.dtype, needs: AttentionNeeds, *, training: bool
) -> AttentionChoice:
    """Return the attention of `auto` on this device with the installed packages."""
    cuda = device.type == "cuda"
    return automatic_attention(
        needs,
        cuda=cuda,
        bfloat16=has_bfloat16(device),
        compute_dtype=str(compute_dtype).removeprefix("torch."),
        flash_package=cuda and FLASH_AVAILABLE[FLASH](),
        training=training,
        varlen_runs=not training or _varlen_obstacle(device, compute_dtype, needs) is None,
    )
