"""The packed weights that published checkpoints have in place of 16-bit ones, decoded to bf16.

* FP8 (DeepSeek, Qwen): `X` in E4M3 and `X_scale_inv`, a factor for each block of rows and columns
  (`weight_block_size`), or one for the tensor. The last blocks may be cut.
* MXFP4 (gpt-oss): `X_blocks`, 16 bytes of two E2M1 values (the low half first) for each 32 inputs,
  and `X_scales`, a power of two for each, with a bias of 127 (OCP Microscaling, v1.0). They lie as
  (experts, out, in / 32, 16), the model's parameter as (experts, in, out).
"""

import torch

# E2M1 by code: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_BLOCK = 32
EXPONENT_BIAS = 127


def decode_fp8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block_size: tuple[int, int] | None,
    *,
    first_row: int = 0,
) -> torch.Tensor:
    """Return rows of a weight (..., rows, in) in bf16; the product is in fp32.

    scale: of the whole weight; block_size: rows and columns of a block, None for one scale;
    first_row: the number of the first row of `weight` in the whole.
    """
    factors = scale.float()
    if block_size is not None:
        rows = torch.arange(first_row, first_row + weight.shape[-2]) // block_size[0]
        columns = torch.arange(weight.shape[-1]) // block_size[1]
        factors = factors[..., rows, :][..., columns]
    return (weight.float() * factors).to(torch.bfloat16)


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return experts (experts, in, out) in bf16 of blocks (experts, out, in / 32, 16) and scales
    (experts, out, in / 32), both uint8. Exact: bf16 has all of these values.
    """
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.tensor(E2M1)[codes.int()]
    exponents = scales.int().unsqueeze(-1) - EXPONENT_BIAS
    return torch.ldexp(values, exponents).flatten(-2).to(torch.bfloat16).mT.contiguous()
