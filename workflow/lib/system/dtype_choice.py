"""Dtypes of `auto`, by the capabilities of a device; without torch.

Preflight calls this for a machine that may not be available, training and evaluation for their own
device (`model.backends`)."""

from dataclasses import dataclass

from workflow.lib.system.errors import UserError, setting_error


def choose_dtype(name: str, *, cuda: bool, bfloat16: bool) -> str:
    """Return the dtype of `model.compute_dtype`. `auto` is bfloat16 on GPUs that have it
    (`bfloat16`: capability 8.0), else float16. On CPUs it is float32, so that numbers are equal on
    all and parity holds within 1e-4, not 4e-2. Raises `UserError` for float16 on a CPU, or bfloat16
    on a GPU without it."""
    if name == "auto":
        return ("bfloat16" if bfloat16 else "float16") if cuda else "float32"
    if name == "float16" and not cuda:
        obstacle = (
            "it is for GPUs, and this runs on CPUs, which compute it more slowly than float32"
        )
        raise setting_error("model.compute_dtype", name, obstacle, "Set it to auto")
    if name == "bfloat16" and cuda and not bfloat16:
        obstacle = "this GPU (compute capability below 8.0) has no bfloat16"
        raise setting_error("model.compute_dtype", name, obstacle, "Set it to auto")
    return name


COMPUTE_DTYPE, FLOAT8 = "compute_dtype", "float8"
ALIGNED = 16  # cuBLAS requires multiples as sizes of a matrix in float8


@dataclass(frozen=True)
class MatmulHardware:
    cuda: bool
    float8: bool  # compute capability 8.9 and more


def choose_matmul_dtype(name: str, device: MatmulHardware, *, compute_dtype: str) -> str:
    """Return the dtype of `train.matmul_dtype`; `auto` excludes CPUs, which emulate float8. Raises
    `UserError` for a dtype that a GPU lacks, or that does not fit the compute dtype."""
    if name == "auto":
        fits = device.cuda and device.float8 and compute_dtype == "bfloat16"
        return FLOAT8 if fits else COMPUTE_DTYPE
    if name == COMPUTE_DTYPE or not device.cuda:
        return name
    if not device.float8:
        obstacle = "this GPU has no such matmuls (they need NVIDIA's compute capability 8.9)"
        raise setting_error("train.matmul_dtype", name, obstacle, "Set it to auto")
    if compute_dtype != "bfloat16":
        obstacle = (
            f"it needs the compute dtype bfloat16, and model.compute_dtype means {compute_dtype}"
        )
        raise setting_error("train.matmul_dtype", name, obstacle, "Set it to compute_dtype")
    return name


def check_float8_shape(path: str, shape: tuple[int, int], *, block_size: int) -> None:
    """Raise `UserError` if a linear (out, in) cannot be multiplied in 8 bits. block_size: 1 for a
    weight in 16 bits."""
    blocks = f"rows of whole blocks of {block_size} (quantize.block_size) and "
    if shape[1] % block_size or any(size % ALIGNED for size in shape):
        raise UserError(
            f"train.matmul_dtype = float8: {path} has the shape {shape}, and float8 needs "
            f"{blocks if block_size > 1 else ''}sizes that are multiples of {ALIGNED}. Set "
            "train.matmul_dtype to compute_dtype."
        )
