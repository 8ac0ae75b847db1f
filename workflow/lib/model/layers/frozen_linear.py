"""The linear whose frozen weight is parameters that can be sharded, in NF4 or in 16 bits
(`weight_storage`).

Each stored part is a frozen 1-D float32 view of its bytes: FSDP2 copies bf16 groups through float
and rewrites NaN bits (pytorch#159333, bitsandbytes#1945), torch 2.11 refuses frozen uint8
parameters, and so each rank holds 1/N of the state that other integrations replicate (1 GiB per GPU
at 70B). The weight is decoded at each use."""

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from workflow.lib.kernels.eight_bits.matmul import Stored
from workflow.lib.model.layers.frozen_matmul import MatmulPrecision, frozen_linear
from workflow.lib.model.layers.weight_storage import WeightStorage

IN_COMPUTE_DTYPE = MatmulPrecision()


class FrozenLinear(nn.Linear):
    """y = x W^T + b with a frozen weight, as a linear for PEFT and Transformers. Parameters: the
    stored parts, and `bias`; buffers: the tables of the storage. Built on meta; filled by
    `nf4_model.load_weights_`."""

    weight: nn.Parameter

    def __init__(self, spec: WeightStorage, *, bias: bool, compute_dtype: torch.dtype) -> None:
        out_features, in_features = spec.shape
        super().__init__(in_features, out_features, bias=bias, device="meta", dtype=compute_dtype)
        self.spec, self._sizes = spec, spec.sizes
        self.matmul_precision = IN_COMPUTE_DTYPE
        self.row_scales: torch.Tensor | None = None
        for name, num_bytes in self._sizes.items():
            padded = torch.empty(math.ceil(num_bytes / 4), device="meta")  # whole elements of fp32
            self.register_parameter(name, nn.Parameter(padded, requires_grad=False))
        if self.bias is not None:
            self.bias.requires_grad_(False)
        for name, size in spec.tables.items():
            self.register_buffer(name, torch.empty(size, device="meta"))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`, shape (out_features, in_features), perhaps as a view. Must
        be called while the parameters are gathered (inside its layer's forward or backward)."""
        return self.spec.decode(self.stored(), dtype)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(out_features, in_features), for matmuls (`frozen_matmul`)."""
        return self.spec.shape

    def stored(self) -> Stored:
        """Return the stored weight, gathered."""
        # attribute access would search for each anew
        parts = cast("dict[str, torch.Tensor]", self._parameters)
        for name, size in self._sizes.items():
            assert 4 * parts[name].numel() >= size, f"{name} is not on the device"
        return self.spec.stored(parts, self._buffers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b; x: (..., in_features)."""
        return frozen_linear(x, self, bias=True)


def frozen_linears(model: nn.Module) -> Iterator[tuple[str, FrozenLinear]]:
    """Yield path and module of every frozen linear, stacks of experts included."""
    for path, module in model.named_modules():
        if isinstance(module, FrozenLinear):
            yield path, module
