"""Columns to round, by the kernel and by the loop."""

import torch

from workflow.lib.quantization.calibrated_rounding import columns_by_kernel, columns_by_loop

SHAPES = [(9, 128), (5, 40), (4, 1)]

Columns = tuple[torch.Tensor, torch.Tensor]


def columns(shape: tuple[int, int], *, device: str) -> tuple[Columns, Columns]:
    """Return codes and errors of both, for columns and a factor that are parts of wider ones."""
    draw = torch.Generator().manual_seed(0)
    rows, count = shape
    weight = torch.randn(rows, count + 19, generator=draw).to(device)
    scale = torch.rand(shape, generator=draw).mul_(2).to(device)
    scale[rows // 2] = 0.0
    factor = torch.randn(count + 19, count + 19, generator=draw).div_(8).triu_()
    factor.diagonal().abs_().add_(0.5)
    upper = factor.to(device)[7 : 7 + count, 7 : 7 + count]
    return (
        columns_by_kernel(weight.clone()[:, 7 : 7 + count], scale, upper),
        columns_by_loop(weight.clone()[:, 7 : 7 + count], scale, upper),
    )
