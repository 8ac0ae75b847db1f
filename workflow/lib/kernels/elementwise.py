"""GPU kernels of the engine, in Triton: what PyTorch and bitsandbytes do in several passes over
memory, in one.

Triton comes with PyTorch's CUDA and ROCm builds; it needs a C compiler and a folder for its cache.
`usable` tries it once. Where it cannot be used, and on the CPU, the callers (`nf4_linear`,
`fused_feed_forward`, `fused_logits`, `rows.rotary`, `adapter_dropout`, `dora`,
`grouped_matmul`) take the operations of bitsandbytes and PyTorch. Values are computed in fp32 and
rounded once.
"""

import functools
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch.autograd.graph import increment_version

from workflow.lib.system.device_types import RECORDED

logger = logging.getLogger("workflow")

INSTALLED = importlib.util.find_spec("triton") is not None
TRIED_WEIGHTS = (96, 1024)  # more than one nested block
PROGRAM_WEIGHTS = 4096  # that one program decodes; with two warps 3.2 of an H200's 4.8 TB/s
PROGRAM_GROUPS = 512  # of 8 features, of a dropout's program
PROGRAM_ELEMENTS = 2048  # of an elementwise kernel's program
WARPS = 4
WITHOUT = (
    "steps take longer, and the loss more memory, which preflight counts if train.fused_loss is "
    "false"
)
COLUMNS, ROWS = 256, 64  # of a program that sums over rows

if INSTALLED:
    from workflow.lib.kernels.triton_code import elementwise as triton_kernels


def usable(device: torch.device) -> bool:
    """Return whether the kernels run on this device; tried once, and said in the log if a GPU must
    do without them.
    """
    return device.type == RECORDED or (device.type == "cuda" and _tried(device))


@functools.cache
def _tried(device: torch.device) -> bool:
    """Whether decoding gives bit by bit what bitsandbytes gives; whatever fails is what a user's
    machine lacks.
    """
    if not INSTALLED:
        logger.warning("Triton is not installed: %s.", WITHOUT)
        return False
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(TRIED_WEIGHTS, generator=draw).to(device, torch.bfloat16)
    packed, state = quantize_4bit(weights, quant_type="nf4", compress_statistics=True)
    data = NF4Data(
        packed,
        state.absmax,
        state.state2.absmax,
        code=state.code,
        nested_code=state.state2.code,
        offset=state.offset,
        block_size=state.blocksize,
    )
    try:
        decoded = dequantize_nf4(torch.empty_like(weights), data)
    # Whatever it is: no compiler, no folder for the cache and an unknown GPU are errors of Triton's
    # own classes, and a run does without the kernels.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        logger.warning("Triton cannot build kernels here (%s): %s.", reason, WITHOUT)
        return False
    if torch.equal(decoded, dequantize_4bit(packed, state)):
        return True
    logger.warning("Triton's kernel does not decode as bitsandbytes does: %s.", WITHOUT)
    return False


class NF4Data(NamedTuple):
    """An NF4 weight as it is stored, all on one device."""

    packed: torch.Tensor
    """Bytes, two weights each, in a tensor of any type."""
    absmax: torch.Tensor
    """Bytes in a tensor of any type, one a block; or fp32 if `nested_absmax` is None."""
    nested_absmax: torch.Tensor | None
    """fp32, one for 256 blocks."""
    code: torch.Tensor
    """(16,) fp32."""
    nested_code: torch.Tensor
    """(256,) fp32; not read if `nested_absmax` is None, nor is `offset`."""
    offset: torch.Tensor
    """() fp32."""
    block_size: int


def _launch(
    name: str, grid: tuple[int, ...], out: torch.Tensor, *arguments: Any, **options: Any
) -> None:
    """Start a kernel that writes to `out`, which has been allocated: kernels allocate nothing.

    A device that is recorded computes nothing.
    """
    if out.device.type != RECORDED:
        getattr(triton_kernels, name)[grid](out, *arguments, **options)


class Runs(NamedTuple):
    """Blocks of a weight at equal distances: `length` blocks from each of `first`, `first` +
    `stride`, and so on.
    """

    first: int
    length: int
    stride: int


def dequantize_nf4(out: torch.Tensor, data: NF4Data, runs: Runs | None = None) -> torch.Tensor:
    """Fill `out` (contiguous, any float type) with the weights that `data` encodes, or with these
    runs of their blocks; return it.

    The same values as bitsandbytes' `dequantize_4bit`, bit by bit: products and sums in fp32, none
    contracted.
    """
    blocks = PROGRAM_WEIGHTS // data.block_size
    grid = (-(-out.numel() // (blocks * data.block_size)),)
    double = data.nested_absmax is not None
    _launch(
        "dequantize_nf4",
        grid,
        out,
        data.packed,
        data.absmax,
        data.nested_absmax if double else data.absmax,  # a pointer that is not read, else
        data.code,
        data.nested_code,
        data.offset,
        out.numel(),
        *(runs or (0, 0, 0)),
        in_runs=runs is not None,
        block_size=data.block_size,
        double_quant=double,
        num_blocks=blocks,
        num_warps=WARPS // 2,
        # code * absmax + offset in one operation would be rounded once; bitsandbytes rounds twice.
        enable_fp_fusion=False,
    )
    return out


def sum_by_token(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Return the sum (T, width) of the rows (R, width) at `places` (T, k) int64, times `weights`
    (T, k) if there are any; one choice after the other.
    """
    num_tokens, top_k = places.shape
    width = rows.shape[1]
    out = rows.new_empty(num_tokens, width)
    _launch(
        "sum_by_token",
        (num_tokens, -(-width // PROGRAM_ELEMENTS)),
        out,
        rows.contiguous(),
        places.contiguous(),
        places if weights is None else weights.contiguous(),  # a pointer that is not read, or
        width,
        top_k,
        weighted=weights is not None,
        size=PROGRAM_ELEMENTS,
        num_warps=WARPS,
    )
    return out


def lengthened_act_and_mul_backward_(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    factors: Sequence[torch.Tensor],
    *,
    activation: str,
    multiplier: float = 1.0,
) -> torch.Tensor:
    """In place, for the gradient `grad` of act(multiplier * gate) * up, where `gate` and `up`
    (T, f) are directions times `factors` (f,) fp32: they become the gradients of the directions,
    `grad` the product itself. activation: `silu` or `gelu_tanh`. gate, up: rows of one distance, as
    halves of a value have them.

    Return the sums over rows (2, f) fp32 of gate and of up times their gradients.
    """
    assert gate.stride() == up.stride(), "the kernel knows one distance of rows for both"
    num_rows, width = gate.shape
    grid = (-(-width // COLUMNS), -(-num_rows // ROWS))
    sums = torch.empty((2, grid[1], width), dtype=torch.float32, device=gate.device)
    _launch(
        "lengthened_act_and_mul_backward", grid, sums, grad, gate, up, gate.stride(0), multiplier,
        *factors, num_rows, width, kind=activation, rows=ROWS, columns=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    increment_version((grad, gate, up))
    return sums.sum(dim=1)


def lengthen_backward(
    grad: torch.Tensor, y: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return grad times factor (width,) fp32, and the sum over rows (width,) fp32 of grad times y
    (..., width), which is contiguous.
    """
    grad = grad.contiguous()
    width = y.shape[-1]
    num_rows = y.numel() // width
    grid = (-(-width // COLUMNS), -(-num_rows // ROWS))
    sums = torch.empty((grid[1], width), dtype=torch.float32, device=y.device)
    scaled = torch.empty_like(grad)
    _launch(
        "lengthen_backward", grid, sums, scaled, grad, y, factor, num_rows, width,
        rows=ROWS, columns=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return scaled, sums.sum(dim=0)


def drop(
    out: torch.Tensor,
    rows: torch.Tensor,
    row_keys: torch.Tensor,
    linear: int,
    threshold: int,
    *,
    add: bool = False,
) -> torch.Tensor:
    """Fill `out` with rows (T, features) of which `adapter_dropout` drops some, or `add` them to
    it; return it. `out` may be `rows`.

    row_keys, linear, threshold: as in `adapter_dropout.Draw`.
    """
    tokens, features = rows.shape
    groups = -(-features // 8)
    assert out.is_contiguous(), "the kernel knows no strides"
    size = min(PROGRAM_GROUPS, power_of_two(groups))
    _launch(
        "drop", (tokens, -(-groups // size)), out, rows.contiguous(), row_keys,
        tokens // len(row_keys), features, groups, linear, threshold,
        add=add, size=size, num_warps=WARPS,
    )  # fmt: skip
    if add or out is rows:
        increment_version((out,))
    return out


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    back: bool = False,
    neighbours: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x (rows, seq_len, heads, head_dim), rotated as in `rows.rotary` (`back`: the other
    way), in `out` if it is given. In both tokens lie at equal distances.

    cos, sin: (1 or rows, seq_len, pairs), of equal strides.
    """
    out = x.new_empty(x.shape) if out is None else out
    distances = token_distance(x), token_distance(out)
    assert None not in distances, "the kernel knows one distance of tokens"
    rows, seq_len, heads, head_dim = x.shape
    pairs = cos.shape[-1]
    cos, sin = (_with_one_distance(angles) for angles in (cos, sin))
    assert cos.stride() == sin.stride(), "the kernel knows one distance for both"
    _launch(
        "apply_rotary",
        (rows * seq_len,),
        out,
        x,
        cos,
        sin,
        cos.shape[0] * cos.shape[1],
        *cos.stride()[1:],
        heads,
        head_dim,
        *distances,
        back=back,
        pairs=pairs,
        neighbours=neighbours,
        heads=power_of_two(heads),
        width=power_of_two(pairs),
        rest=power_of_two(head_dim - 2 * pairs) if head_dim > 2 * pairs else 0,
        num_warps=WARPS,
    )
    return out


def _with_one_distance(angles: torch.Tensor) -> torch.Tensor:
    """Return angles (rows, seq_len, pairs) whose tokens lie at equal distances."""
    rows, seq_len, _ = angles.shape
    of_row, of_token, _ = angles.stride()
    return angles if rows == 1 or of_row == seq_len * of_token else angles.contiguous()


def token_distance(x: torch.Tensor) -> int | None:
    """Return how many elements lie between the starts of two tokens of x (rows, seq_len, heads,
    head_dim), if this is one number and the heads of a token lie side by side, as in a contiguous
    tensor and in parts of its heads; None otherwise.
    """
    rows, seq_len, heads, head_dim = x.shape
    of_row, of_token, of_head, of_dim = x.stride()
    distance = of_token if seq_len > 1 else of_row
    alike = rows == 1 or seq_len == 1 or of_row == seq_len * of_token
    return distance if alike and of_dim == 1 and (heads == 1 or of_head == head_dim) else None


def power_of_two(number: int) -> int:
    """Return the next power of two, the only sizes that Triton's ranges have."""
    return 1 << (number - 1).bit_length()
