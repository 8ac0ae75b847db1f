"""The NF4 linear layer whose packed weight and quantization state are ordinary parameters, so that
they can be sharded: those of decoder layers by `packed_layers`, others by FSDP2.

Packed weights, 8-bit absmax and nested absmax are frozen 1-D `float32` parameters: views of the
bytes. float32 because FSDP2 copies bf16 groups through float on CUDA and so rewrites NaN bit
patterns (pytorch#159333, bitsandbytes#1945), because torch 2.11 refuses frozen uint8 parameters,
and because every rank then holds 1/N of the state that other integrations replicate (1 GiB per GPU
at 70B). The `QuantState` of bitsandbytes is rebuilt at each use.

QLoRA (arXiv 2305.14314): w = code[q] * absmax[block], absmax = code2[a] * absmax2[block2] + offset.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from torch import nn

from workflow.lib.kernels import elementwise as kernels
from workflow.lib.model.layers.frozen_matmul import ProductTypes, frozen_product

# bitsandbytes' fixed block of the second quantization (functional.quantize_4bit)
NESTED_BLOCK_SIZE = 256
STATE_SUFFIX = "weight.quant_state.bitsandbytes__nf4"


@dataclasses.dataclass(frozen=True)
class NF4Spec:
    """What a packed weight is: shape (out_features, in_features), weights per scale, double
    quantization.

    Weights of several experts are one below the other: `out_features` is that of all together.
    """

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
        """Return the bytes of a part that encode weights `start` to `stop`; `start` begins a nested
        block.
        """
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


def decoded(packed: torch.Tensor, state: QuantState) -> torch.Tensor:
    """Return the weights, of `state.shape` in `state.dtype`, that the bytes `packed` (n, 1) encode.

    bitsandbytes 0.50 starts a block at every row on CPUs with AVX-512, where quantization lets
    blocks run on from row to row. So rows that are not whole blocks are decoded as rows of one
    block each, or, where the last block is not full, as one long row (which one thread does).
    """
    shape, size = state.shape, state.blocksize
    if shape[-1] % size == 0:
        return dequantize_4bit(packed, state)
    count = math.prod(shape)
    rows = (1, count) if count % size else (count // size, size)
    flat = copy.copy(state)
    flat.shape = torch.Size(rows)
    return dequantize_4bit(packed, flat).view(shape)


IN_COMPUTE_TYPE = ProductTypes()


class NF4Linear(nn.Linear):
    """y = x W^T + b with a frozen NF4 weight. A subclass of `nn.Linear` so that PEFT and
    Transformers see a linear.

    Parameters (all frozen, 1-D float32 views of bytes, padded to 4): `weight`, `absmax`, and with
    double quantization `nested_absmax`. Buffers (replicated, about 1 KiB): `quant_map` (16,),
    `nested_quant_map` (256,), `nested_offset` ().
    Built on the meta device; filled by `nf4_model.load_weights_`.
    """

    weight: nn.Parameter
    absmax: nn.Parameter
    quant_map: torch.Tensor
    nested_quant_map: torch.Tensor
    nested_offset: torch.Tensor

    def __init__(self, spec: NF4Spec, *, bias: bool, compute_dtype: torch.dtype) -> None:
        out_features, in_features = spec.shape
        super().__init__(in_features, out_features, bias=bias, device="meta", dtype=compute_dtype)
        self.spec, self._sizes = spec, spec.sizes
        self.product_types = IN_COMPUTE_TYPE
        self.row_scales: dict[str, torch.Tensor] = {}
        for name, num_bytes in self._sizes.items():
            self.register_parameter(name, _byte_parameter(num_bytes))
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.register_buffer("quant_map", torch.empty(16, device="meta"))
        self.register_buffer("nested_quant_map", torch.empty(256, device="meta"))
        self.register_buffer("nested_offset", torch.empty((), device="meta"))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`, shape (out_features, in_features).

        Must be called while the parameters are gathered (inside its layer's forward or backward).
        """
        if kernels.usable(self.weight.device):
            weight = torch.empty(self.spec.shape, dtype=dtype, device=self.weight.device)
            return kernels.dequantize_nf4(weight, self.nf4_data())
        parts = {name: self._bytes(name) for name in self._sizes}
        return self.dequantize_parts(parts, shape=self.spec.shape, dtype=dtype)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(out_features, in_features), for products (`frozen_matmul`)."""
        return self.spec.shape

    def nf4_data(self) -> kernels.NF4Data:
        """Return the weight as it is stored, gathered.

        The parameters are handed over as they are: views of their bytes would take the host's
        time at every use.
        """
        # by attribute each would be looked for anew
        stored = cast("dict[str, torch.Tensor]", self._parameters)
        for name, size in self._sizes.items():
            assert 4 * stored[name].numel() >= size, f"{name} is not on the device"
        return kernels.NF4Data(
            stored["weight"],
            stored["absmax"],
            stored.get("nested_absmax"),
            code=self.quant_map,
            nested_code=self.nested_quant_map,
            offset=self.nested_offset,
            block_size=self.spec.block_size,
        )

    def dequantize_parts(
        self, parts: Mapping[str, torch.Tensor], *, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the weights, of `shape`, that bytes (uint8) of each parameter encode; they start
        at a whole block.
        """
        state = self._quant_state(parts, shape=shape, dtype=dtype)
        return decoded(parts["weight"].unsqueeze(1), state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b; x: (..., in_features)."""
        return frozen_product(x, self, bias=True)

    def _bytes(self, name: str) -> torch.Tensor:
        """The stored bytes of a parameter, without the padding."""
        stored: torch.Tensor = getattr(self, name)
        size = self._sizes[name]
        # kernels would read past it
        assert 4 * stored.numel() >= size, f"{name} is not on the device"
        return stored.detach().view(torch.uint8)[:size]

    def _quant_state(
        self, parts: Mapping[str, torch.Tensor], *, shape: tuple[int, ...], dtype: torch.dtype
    ) -> QuantState:
        spec = self.spec
        state = {
            "shape": torch.Size(shape),
            "code": self.quant_map,
            "blocksize": spec.block_size,
            "quant_type": "nf4",
            "dtype": dtype,
        }
        if not spec.double_quant:
            return QuantState(absmax=parts["absmax"].view(torch.float32), **state)
        nested = QuantState(
            absmax=parts["nested_absmax"].view(torch.float32),
            code=self.nested_quant_map,
            blocksize=NESTED_BLOCK_SIZE,
            dtype=torch.float32,
        )
        return QuantState(absmax=parts["absmax"], state2=nested, offset=self.nested_offset, **state)


def _byte_parameter(num_bytes: int) -> nn.Parameter:
    """A frozen float32 parameter on meta that holds `num_bytes`, padded to whole elements."""
    return nn.Parameter(torch.empty(math.ceil(num_bytes / 4), device="meta"), requires_grad=False)


def nf4_linears(model: nn.Module) -> Iterator[tuple[str, NF4Linear]]:
    """Yield path and module of every NF4 linear."""
    for path, module in model.named_modules():
        if isinstance(module, NF4Linear):
            yield path, module
