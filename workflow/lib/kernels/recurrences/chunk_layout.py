"""How kernels of recurrences take tensors, and how many columns their programs have."""

import torch

from workflow.lib.kernels.launch import power_of_two

CHUNK = 64  # tokens, as in `triton_code.chunks`
LEAST_COLUMNS = {2: 64, 4: 16}  # of a program, by the bytes of a value; see `delta_kernels.TILES`


def spaced(x: torch.Tensor) -> torch.Tensor:
    """Return x (rows, tokens, heads, width) with equal distances and contiguous heads."""
    rows, tokens = x.shape[:2]
    of_row, of_token, _, of_column = x.stride()
    alike = rows == 1 or of_row == tokens * of_token
    return x if alike and of_column == 1 else x.contiguous()


def strides_of(**tensors: torch.Tensor) -> dict[str, int]:
    """Return the distances of tokens and of heads under the names that kernels have for them."""
    return {
        f"{name}_{of}": x.stride(dim)
        for name, x in tensors.items()
        for dim, of in ((1, "token"), (2, "head"))
    }


def parts_of(whole: int, size: int) -> int:
    return -(-whole // size)


def padded(width: int, dtype: torch.dtype) -> int:
    """Return how many columns a program needs for so many."""
    return max(LEAST_COLUMNS[dtype.itemsize], power_of_two(width))
