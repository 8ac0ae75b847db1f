"""What the GPU kernels of matmuls in 8 bits must compute: by Triton's interpreter on the CPU,
compiled on a GPU; each beside what `eight_bits.matmul` computes on a CPU."""

import torch
from bitsandbytes.functional import QuantState, quantize_4bit

from workflow.lib.kernels.eight_bits import matmul
from workflow.lib.kernels.eight_bits.matmul import (
    FLOAT8,
    Rounded,
    RoundedWeight,
    decoded,
    eight_bit_matmul,
    round_weight,
    rounded,
    row_scales,
    unfilled,
)
from workflow.lib.kernels.nf4.decode import NF4Data

# (out, in): less than a program has, and a last program that is not full; rows of 3 blocks
SHAPES = ((16, 256), (144, 192))
ROWS = 9
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def nf4_data(shape: tuple[int, int], *, double_quant: bool) -> NF4Data:
    """Return a random weight with a row of zeros, on the CPU."""
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weights[1] = 0
    packed, state = quantize_4bit(weights, compress_statistics=double_quant, quant_type="nf4")
    assert isinstance(state, QuantState)
    return NF4Data.of(packed, state)


def moved(data: NF4Data, device: str) -> NF4Data:
    return NF4Data(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in data))


def activations(width: int) -> torch.Tensor:
    """Return rows of which one is zero, one tiny, one has a column of outliers."""
    rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1))
    rows[3] = 0
    rows[7] *= 1e-38
    rows[:, 5] *= 300
    return rows


def weights_and_activations(*, device: str, interpreted: bool) -> Pairs:
    """Return pairs of what a kernel gives and what it must give, bit by bit.

    interpreted: Triton's interpreter cuts float8 off where a GPU rounds, so there the kernels write
    what is still to be rounded."""
    dtype = torch.float32 if interpreted else FLOAT8
    pairs: Pairs = []
    for shape in SHAPES:
        for double_quant in (True, False):
            data = nf4_data(shape, double_quant=double_quant)
            there, scales = moved(data, device), row_scales(data, shape)
            made = matmul.scales_of_rows.kernel(there, shape)
            pairs.append((made, scales))
            for transposed in (False, True):
                decode = matmul.decode_columns if transposed else matmul.decode_rows
                stack = matmul.StoredStack(there, 1, *shape)
                (values,) = decode.kernel(stack, made, 0, shape[transposed], dtype)
                expected = decoded(data, scales, shape, transposed=transposed)
                pairs.append((values, expected))
        rows = activations(shape[1])
        for factors in (None, torch.rand(shape[1]) + 0.5):
            pairs += _rounded_rows(rows, factors, dtype=dtype, device=device)
    pairs += _rounded_weights(dtype=dtype, device=device)
    wide = activations(matmul.WHOLE_ROW + 5)  # more than a program has in registers
    pairs += _rounded_rows(wide, None, dtype=dtype, device=device)
    return [(one.cpu().to(other.dtype), other) for one, other in pairs]


def _rounded_weights(*, dtype: torch.dtype, device: str) -> Pairs:
    """Weights in 16 bits: some rows of a stack with a scale for each expert, columns transposed."""
    draw = torch.Generator().manual_seed(2)
    weights = torch.randn(3, 150, 266, generator=draw).to(torch.bfloat16)
    scales = row_scales(weights, (3, 150 * 266)).view(3, 1).expand(3, 150)
    pairs: Pairs = []
    for transposed in (False, True):
        part = weights[..., 4:260] if transposed else weights[:, 7:149]
        own = scales if transposed else scales[:, 7:149]
        expected = round_weight(part, own, transposed=transposed)
        given = (part.to(device), own.to(device)) if device != "cpu" else (part, own)
        op = matmul.weight_columns if transposed else matmul.weight_rows
        made = op.kernel(*given, dtype)
        pairs.append((made, expected))
    return pairs


def _rounded_rows(
    rows: torch.Tensor,
    factors: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    device: str,
) -> Pairs:
    copy = rounded(rows, factors=factors)
    given = None if factors is None else factors.to(device)
    made = unfilled(rows.shape, torch.device(device), dtype=dtype)
    matmul.round_rows.kernel(*made, rows.to(device), given)
    return [*zip(made, copy, strict=True)]


def float8_matmul(*, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's matmul of rounded operands on a GPU in bf16, and the CPU's in fp32."""
    shape = (144, 192)
    data = nf4_data(shape, double_quant=True)
    scales = row_scales(data, shape)
    left, values = rounded(activations(192)), decoded(data, scales, shape)
    expected = eight_bit_matmul(left, RoundedWeight(values, scales), dtype=torch.float32)
    there = Rounded(left.values.to(device), left.scales.to(device))
    weight = RoundedWeight(values.to(device), scales.to(device))
    return eight_bit_matmul(there, weight, dtype=torch.bfloat16).float().cpu(), expected
