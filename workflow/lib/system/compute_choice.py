"""Which data type and attention `auto` means, by what a device and the packages can; without torch.

Preflight decides here for a machine that may not be at hand, training and evaluation for the device
that they run on (`model.backends`).
"""

from workflow.lib.system.errors import setting_error

FLASH, VARLEN = "flash_attention_2", "varlen"


def choose_dtype(name: str, *, cuda: bool, bfloat16: bool) -> str:
    """Return the type that `model.compute_dtype` means: `auto` is bfloat16 on GPUs that have it,
    else float16, and float32 on CPUs.

    bfloat16: whether the GPUs have it (compute capability 8.0 and more). Raises `UserError` for
    float16 on a CPU, or bfloat16 on a GPU without it.

    float32 on all CPUs, also where bfloat16 is faster: the same settings give the same numbers on
    any CPU, and the reloaded adapter is compared within 1e-4 in place of 4e-2. preflight says where
    bfloat16 would save time.
    """
    if name == "auto":
        return ("bfloat16" if bfloat16 else "float16") if cuda else "float32"
    if name == "float16" and not cuda:
        lack = "it is for GPUs, and this runs on CPUs, which compute it more slowly than float32"
        raise setting_error("model.compute_dtype", name, lack, "Set it to auto")
    if name == "bfloat16" and cuda and not bfloat16:
        lack = "this GPU (compute capability below 8.0) has no bfloat16"
        raise setting_error("model.compute_dtype", name, lack, "Set it to auto")
    return name


def automatic_attention(
    *,
    cuda: bool,
    bfloat16: bool,
    compute_dtype: str,
    flash_package: bool,
    softcapped: bool,
    training: bool,
    dropout: float = 0.0,
) -> str:
    """Return the implementation that `model.attention: auto` means.

    It is flash_attention_2 where its package is, else for training varlen, both on a GPU of compute
    capability 8.0 (`bfloat16`) in 16 bits; else sdpa. softcapped: the model soft-caps its attention
    scores (Gemma 2), which varlen and sdpa cannot: eager. dropout: of attention weights, which
    varlen cannot.
    """
    if cuda and bfloat16 and compute_dtype != "float32":
        if flash_package:
            return FLASH
        if training and not softcapped and dropout == 0:
            return VARLEN
    return "eager" if softcapped else "sdpa"
