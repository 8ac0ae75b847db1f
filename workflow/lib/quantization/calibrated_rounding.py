"""Codes and scales of one weight with the least loss for its actual inputs.

The error of a linear is E |(W - Q) x|^2 = tr (W - Q) H (W - Q)^T with H = E x x^T. It selects each
block's scale, from some shares of its largest weight, and the codes: columns are rounded one after
the other, and later columns compensate their loss as far as inputs are correlated (GPTQ, arXiv
2210.17323). Columns with the largest inputs come first: on SmolLM2-135M that recovered 95% of NF4's
loss, the columns' own order 81% (docs/results.md)."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from workflow.lib.kernels.kernel_launch import launch, power_of_two
from workflow.lib.kernels.op import Case, Op
from workflow.lib.quantization.nf4_codes import (
    Scales,
    code_edges,
    code_table,
    nearest_codes,
    store_scales,
)
from workflow.lib.settings.config import QuantizeConfig

logger = logging.getLogger("workflow")

# Scales as shares of a block's largest weight. 1 is bitsandbytes' choice; below 0.79 clipped
# weights cost more than the finer steps gain.
SHARES = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79)
DAMPING = 0.02  # of the mean of the correlation's diagonal, added to it before inversion
MORE_DAMPING = (0.02, 0.1, 1.0)  # where the factorization fails, in float64
COLUMNS = 128  # in a group: its errors go to all later columns at once
BLOCKS = 2**18  # searched at once: more would take gigabytes for the widest linears
PROGRAM_ROWS = 4


@dataclass(frozen=True)
class Rounded:
    """A weight in NF4: codes and scales of its blocks."""

    codes: torch.Tensor  # uint8, shape (out, in)
    scales: Scales


@dataclass(frozen=True)
class ErrorFeedback:
    """The compensation of a column's error in others; weights with one input share it."""

    order: torch.Tensor  # (in,) int64: the columns, those with the largest inputs first
    factor: torch.Tensor
    """U (in, in) fp32, upper triangular: U^T U = inverse correlation of the inputs, in order."""

    importance: torch.Tensor
    """(in,) fp32, in the columns' own order: the mean square of each column's inputs."""


def round_calibrated(
    weight: torch.Tensor, feedback: ErrorFeedback, settings: QuantizeConfig
) -> Rounded:
    """Return a weight (out, in) fp32 in NF4: scales by the inputs' importance, each column's error
    compensated in the columns after it."""
    scales = store_scales(
        searched_scales(weight, feedback.importance, block_size=settings.block_size),
        double_quant=settings.double_quant,
    )
    codes = codes_with_feedback(weight, feedback, scales.decoded, block_size=settings.block_size)
    return Rounded(codes, scales)


def error_feedback(correlation: torch.Tensor, *, what: str) -> ErrorFeedback:
    """Return the order of columns, and the feedback of errors, for inputs of a correlation (in,
    in). Inputs that are always 0 count as uncorrelated with all others. If float32 does not
    suffice, float64 is tried, then more damping, with a warning."""
    order = correlation.diagonal().argsort(descending=True, stable=True)
    for dtype, damping in ((torch.float32, DAMPING), *((torch.float64, d) for d in MORE_DAMPING)):
        factor = _factor(correlation[order][:, order].to(dtype), damping)
        if factor is not None:
            if damping > DAMPING:
                logger.warning(
                    "%s: the correlation of its inputs could be inverted only with %g of its "
                    "diagonal's mean added, so calibration changes less there",
                    what, damping,
                )  # fmt: skip
            return ErrorFeedback(order, factor.float(), correlation.diagonal())
    raise AssertionError(f"{what}: a damped correlation is positive definite")


def _factor(damped: torch.Tensor, damping: float) -> torch.Tensor | None:
    """Return U with U^T U = (H + damping)^-1; None if H is indefinite. Overwrites damped."""
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += damping * diagonal.mean()
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        return None
    inverse = torch.cholesky_inverse(lower, out=damped)
    # each of these matrices takes gigabytes for the widest linears
    upper, failed = torch.linalg.cholesky_ex(inverse, upper=True, out=(lower, failed))
    return None if failed or not upper.isfinite().all() else upper


def searched_scales(
    weight: torch.Tensor, importance: torch.Tensor, *, block_size: int
) -> torch.Tensor:
    """Return a scale (blocks,) fp32 for each block of the flattened weight (out, in): of `SHARES`
    of its largest weight, the one with the least squared error, weighted by each input's
    `importance` (in,). Of equal ones the first: bitsandbytes' own unless another is better."""
    scales = []
    for first, blocks in _numbered(_blocks(weight, block_size).split(BLOCKS)):
        columns = torch.arange(blocks.numel(), device=weight.device) + first * block_size
        scales.append(_best_scales(blocks, importance[columns % len(importance)].view_as(blocks)))
    return torch.cat(scales)


def _best_scales(blocks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the scale (blocks,) of blocks (blocks, block_size), with these weights of errors."""
    edges = code_edges(table := code_table(blocks.device))
    largest = blocks.abs().amax(1, keepdim=True)
    best, least = largest, torch.full_like(largest, torch.inf)
    for share in SHARES:
        scale = share * largest
        rounded = table[nearest_codes(blocks, scale, edges)] * scale
        error = ((rounded - blocks).square() * weights).sum(1, keepdim=True)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best.squeeze(1)


def _blocks(values: torch.Tensor, block_size: int) -> torch.Tensor:
    flat = values.reshape(-1)
    lacking = -flat.numel() % block_size
    return torch.nn.functional.pad(flat, (0, lacking)).view(-1, block_size)


def codes_with_feedback(
    weight: torch.Tensor, feedback: ErrorFeedback, scales: torch.Tensor, *, block_size: int
) -> torch.Tensor:
    """Return codes (out, in) uint8, nearest with error feedback; scales: decoded (blocks,)."""
    order, factor = feedback.order, feedback.factor
    remaining, codes = weight[:, order], torch.empty_like(weight, dtype=torch.uint8)
    for first in range(0, len(order), COLUMNS):
        columns = order[first : first + COLUMNS]
        last = first + len(columns)
        part, upper = remaining[:, first:last], factor[first:last, first:last]
        scale = column_scales(scales, weight.shape, columns, block_size=block_size)
        chosen, errors = round_columns(part, scale, upper)
        remaining[:, last:] -= errors @ factor[first:last, last:]
        codes[:, columns] = chosen
    return codes


def column_scales(
    scales: torch.Tensor, shape: torch.Size, columns: torch.Tensor, *, block_size: int
) -> torch.Tensor:
    """Return the scale of each weight of `columns` (int64), (out, columns); shape: the weight's."""
    rows = torch.arange(shape[0], device=scales.device).unsqueeze(1) * shape[1]
    return scales[(rows + columns).div_(block_size, rounding_mode="floor")]


def decode(rounded: Rounded, *, block_size: int) -> torch.Tensor:
    """Return the weight (out, in) fp32 of rounded codes."""
    return decoded_weight(rounded.codes, rounded.scales.decoded, block_size=block_size)


def decoded_weight(codes: torch.Tensor, scales: torch.Tensor, *, block_size: int) -> torch.Tensor:
    """Return the weight (out, in) fp32 of codes (out, in) and decoded scales (blocks,)."""
    table = code_table(codes.device)
    parts = [
        table[part.int()] * scales[first : first + len(part), None]
        for first, part in _numbered(_blocks(codes, block_size).split(BLOCKS))
    ]
    return torch.cat(parts).view(-1)[: codes.numel()].view(codes.shape)


def _numbered(parts: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    first = 0
    for part in parts:
        yield first, part
        first += len(part)


def largest_of_blocks(weight: torch.Tensor, *, block_size: int) -> torch.Tensor:
    """Return the largest magnitude (blocks,) of each block of a weight (out, in)."""
    return _blocks(weight, block_size).abs().amax(1)


def round_absmax(weight: torch.Tensor, settings: QuantizeConfig) -> Rounded:
    """Return bitsandbytes' choice for a weight (out, in) fp32: absmax scales, nearest codes."""
    edges = code_edges(code_table(weight.device))
    largest, codes = [], []
    for blocks in _blocks(weight, settings.block_size).split(BLOCKS):
        scale = blocks.abs().amax(1)
        largest.append(scale)
        codes.append(nearest_codes(blocks, scale.unsqueeze(1), edges).to(torch.uint8))
    scales = store_scales(torch.cat(largest), double_quant=settings.double_quant)
    return Rounded(torch.cat(codes).view(-1)[: weight.numel()].view(weight.shape), scales)


def columns_by_loop(
    part: torch.Tensor, scale: torch.Tensor, upper: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (out, columns) uint8 and errors fp32 of columns rounded in order; `part` (out,
    columns) is overwritten. upper: (columns, columns), of the feedback's factor."""
    edges = code_edges(table := code_table(part.device))
    errors, codes = torch.empty_like(part), torch.empty_like(part, dtype=torch.uint8)
    for column in range(part.shape[1]):
        code = nearest_codes(part[:, column], scale[:, column], edges)
        lost = (part[:, column] - table[code] * scale[:, column]) / upper[column, column]
        part[:, column:] -= torch.outer(lost, upper[column, column:])
        codes[:, column], errors[:, column] = code, lost
    return codes, errors


def columns_by_kernel(
    part: torch.Tensor, scale: torch.Tensor, upper: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as `columns_by_loop`, by one Triton kernel."""
    table = code_table(part.device)
    num_rows, num_columns = part.shape
    codes = torch.empty(part.shape, dtype=torch.uint8, device=part.device)
    errors = torch.empty(part.shape, dtype=torch.float32, device=part.device)
    launch(
        "rounding.round_columns",
        (-(-num_rows // PROGRAM_ROWS),),
        codes,
        errors,
        *(x.contiguous() for x in (part, scale, upper)),
        table,
        code_edges(table),
        num_rows,
        num_columns=num_columns,
        rows=PROGRAM_ROWS,
        columns=power_of_two(num_columns),
        num_warps=1,
        # PyTorch's loop rounds a product and a sum each; fused they would be rounded once
        enable_fp_fusion=False,
    )
    return codes, errors


def _case(device: torch.device) -> Case:
    draw = torch.Generator().manual_seed(0)
    part = torch.randn(5, 32, generator=draw)
    scale = part.abs().amax(dim=1, keepdim=True).expand(5, 32)
    upper = (torch.eye(32) + 0.1 * torch.randn(32, 32, generator=draw)).triu()
    return tuple(x.clone().to(device) for x in (part, scale, upper))


round_columns = Op(
    "calibrated rounding",
    reference=columns_by_loop,
    kernel=columns_by_kernel,
    case=_case,
    variant=lambda *_: (),
)
"""Returns codes (out, columns) uint8, and each column's error divided by its diagonal element of
`upper`, fp32. part: (out, columns), may be overwritten; scale: of every weight; upper: (columns,
columns), upper triangular. All are fp32."""
