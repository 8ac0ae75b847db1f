"""The NF4 linear whose packed weight and quantization state are parameters that can be sharded.

QLoRA (arXiv 2305.14314): w = code[q] * absmax[block], absmax = code2[a] * absmax2[block2] + offset.

Packed weights, absmax and nested absmax are frozen 1-D float32 views of the bytes: FSDP2 copies
bf16 groups through float and rewrites NaN bits (pytorch#159333, bitsandbytes#1945), torch 2.11
refuses frozen uint8 parameters, and so each rank holds 1/N of the state that other integrations
replicate (1 GiB per GPU at 70B). bitsandbytes' `QuantState` is rebuilt at each use."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import nn

from workflow.lib.kernels.nf4.decode import NESTED_BLOCK_SIZE, NF4Data, decode, dequantize_nf4
from workflow.lib.model.layers.frozen_matmul import MatmulPrecision, frozen_linear
from workflow.lib.system.device_types import GPUS

STATE_SUFFIX = "weight.quant_state.bitsandbytes__nf4"


@dataclasses.dataclass(frozen=True)
class NF4Spec:
    """A packed weight: shape (out_features, in_features), weights per scale, double quantization.
    Experts are stacked in rows: `out_features` counts all experts' rows."""

    shape: tuple[int, int]
    block_size: int
    double_quant: bool
    offset: float
    experts: int = 1

    @property
    def num_blocks(self) -> int:
        """Scales of the weight: one per started block."""
        return math.ceil(math.prod(self.shape) / self.block_size)

    def part_range(self, name: str, *, start: int, stop: int) -> tuple[int, int]:
        """Return a part's bytes for weights `start` to `stop`; `start` begins a nested block."""
        if name == "weight":
            return start // 2, math.ceil(stop / 2)
        nested = name == "nested_absmax"
        weights = self.block_size * (NESTED_BLOCK_SIZE if nested else 1)  # that share an element
        size = 1 if self.double_quant and not nested else 4
        return size * (start // weights), size * math.ceil(stop / weights)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each stored part, by parameter name."""
        packed = {"weight": math.ceil(math.prod(self.shape) / 2)}
        if not self.double_quant:
            return packed | {"absmax": 4 * self.num_blocks}
        nested = math.ceil(self.num_blocks / NESTED_BLOCK_SIZE)
        return packed | {"absmax": self.num_blocks, "nested_absmax": 4 * nested}


# Parameter of NF4Linear -> suffix of its tensor in the Transformers/bitsandbytes checkpoint layout.
CHECKPOINT_SUFFIX = {
    "weight": "weight",
    "absmax": "weight.absmax",
    "nested_absmax": "weight.nested_absmax",
}
CODE_SUFFIX = {"quant_map": "weight.quant_map", "nested_quant_map": "weight.nested_quant_map"}


IN_COMPUTE_DTYPE = MatmulPrecision()


class NF4Linear(nn.Linear):
    """y = x W^T + b with a frozen NF4 weight, as a linear for PEFT and Transformers. Frozen 1-D
    float32 views of bytes: `weight`, `absmax`, perhaps `nested_absmax`; buffers `quant_map` (16,),
    `nested_quant_map` (256,), `nested_offset` (). Built on meta; filled by
    `nf4_model.load_weights_`."""

    weight: nn.Parameter
    absmax: nn.Parameter
    quant_map: torch.Tensor
    nested_quant_map: torch.Tensor
    nested_offset: torch.Tensor

    def __init__(self, spec: NF4Spec, *, bias: bool, compute_dtype: torch.dtype) -> None:
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
        self.register_buffer("quant_map", torch.empty(16, device="meta"))
        self.register_buffer("nested_quant_map", torch.empty(256, device="meta"))
        self.register_buffer("nested_offset", torch.empty((), device="meta"))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`, shape (out_features, in_features). Must be called while the
        parameters are gathered (inside its layer's forward or backward)."""
        device, data = self.weight.device, self.nf4_data()
        if device.type not in GPUS:  # bitsandbytes makes the tensor itself there
            return decode(data, shape=self.spec.shape, dtype=dtype)
        return dequantize_nf4(torch.empty(self.spec.shape, dtype=dtype, device=device), data)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(out_features, in_features), for matmuls (`frozen_matmul`)."""
        return self.spec.shape

    def nf4_data(self) -> NF4Data:
        """Return the stored weight, gathered; without byte views, which cost the host time."""
        # attribute access would search for each anew
        stored = cast("dict[str, torch.Tensor]", self._parameters)
        for name, size in self._sizes.items():
            assert 4 * stored[name].numel() >= size, f"{name} is not on the device"
        return self._data(stored["weight"], stored["absmax"], stored.get("nested_absmax"))

    def _data(
        self, packed: torch.Tensor, absmax: torch.Tensor, nested_absmax: torch.Tensor | None
    ) -> NF4Data:
        return NF4Data(
            packed,
            absmax,
            nested_absmax,
            code=self.quant_map,
            nested_code=self.nested_quant_map,
            offset=self.nested_offset,
            block_size=self.spec.block_size,
        )

    def dequantize_parts(
        self, parts: Mapping[str, torch.Tensor], *, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return weights of `shape`, decoded from bytes (uint8) that begin at a block."""
        double = self.spec.double_quant
        nested = parts["nested_absmax"].view(torch.float32) if double else None
        data = self._data(parts["weight"], parts["absmax"], nested)
        return decode(data, shape=shape, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b; x: (..., in_features)."""
        return frozen_linear(x, self, bias=True)


def nf4_linears(model: nn.Module) -> Iterator[tuple[str, NF4Linear]]:
    """Yield path and module of every NF4 linear."""
    for path, module in model.named_modules():
        if isinstance(module, NF4Linear):
            yield path, module
