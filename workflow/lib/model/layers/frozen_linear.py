"""The linear whose frozen weight is parameters that can be sharded, in NF4 or in 16 bits
(`weight_storage`), and its matmuls: decoding, dtype, the adapter's part, the bias.

Each stored part is a frozen 1-D float32 view of its bytes: FSDP2 copies bf16 groups through float
and rewrites NaN bits (pytorch#159333, bitsandbytes#1945), torch 2.11 refuses frozen uint8
parameters, and so each rank holds 1/N of the state that other integrations replicate (1 GiB per GPU
at 70B). The weight is decoded at each use, unless it is kept decoded.

y = x W^T and the gradient g W of x are computed in the compute dtype or in 8 bits, as the model's
`MatmulPrecision` says. In the compute dtype the matmul accumulates on the adapter's part; in 8 bits
that is added afterwards, as row scales cannot add. Feed-forwards add both where they read
values."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from workflow.lib.kernels.eight_bits.matmul import (
    FLOAT8,
    Rounded,
    RoundedWeight,
    Stored,
    decoded,
    eight_bit_matmul,
    rounded,
    row_scales,
)
from workflow.lib.kernels.rows.gating import LowRank, add_low_rank_
from workflow.lib.model.layers.weight_storage import WeightStorage


class MatmulPrecision:
    """Dtype of matmuls with frozen weights: the compute dtype, or the run's in `in_eight_bits`."""

    def __init__(self, *, forward: bool = False, backward: bool = False) -> None:
        self.by_pass = forward, backward
        """Which of them are in float8 within the block."""
        self.forward = self.backward = False
        """Whether y = x W^T, and g W, are in float8 now."""
        self.in_step = False
        """Whether this is the work of a training step."""

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Do the work of a training step in the block, in 8 bits as `in_eight_bits`."""
        self.in_step = True
        try:
            with self.in_eight_bits():
                yield
        finally:
            self.in_step = False

    @contextmanager
    def in_eight_bits(self) -> Iterator[None]:
        """Within the block multiply in the run's dtypes; checks and exports stay outside."""
        self.forward, self.backward = self.by_pass
        try:
            yield
        finally:
            self.forward = self.backward = False


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
        self.row_scales: torch.Tensor | None = None  # of float8: weights do not change
        self.kept: dict[tuple[torch.dtype, bool], torch.Tensor] | None = None
        """The decoded forms that training steps use, by dtype and whether transposed; None: none is
        kept. Steps make them before CUDA graphs, which run from the second micro-batch on."""
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
        return self.kept_or(lambda: self.spec.decode(self.stored(), dtype), dtype)

    def keeps(self, dtype: torch.dtype, *, transposed: bool = False) -> bool:
        """Whether a decoded form is kept, or will be if it is decoded now."""
        if self.kept is None or not self.spec.decoded_bytes(dtype):
            return False
        return self.matmul_precision.in_step or (dtype, transposed) in self.kept

    def kept_or(
        self, decode: Callable[[], torch.Tensor], dtype: torch.dtype, *, transposed: bool = False
    ) -> torch.Tensor:
        """Return the whole weight in a form that `decode` makes, unless it is kept."""
        if not self.keeps(dtype, transposed=transposed):
            return decode()
        assert self.kept is not None
        if (form := (dtype, transposed)) not in self.kept:
            self._keep(form, decode)
        return self.kept[form]

    def _keep(self, form: tuple[torch.dtype, bool], decode: Callable[[], torch.Tensor]) -> None:
        assert self.kept is not None
        self.kept[form] = decode()

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


Operand = torch.Tensor | Rounded


def operand(x: torch.Tensor, linear: FrozenLinear) -> Operand:
    """Return x (..., in) as rows (T, in) for forward: one operand for all linears of x."""
    rows = x.reshape(-1, x.shape[-1])
    return rounded(rows) if linear.matmul_precision.forward else rows


def adapted_matmul(
    linear: FrozenLinear, rows: Operand, update: LowRank, *, dtype: torch.dtype, bias: bool
) -> torch.Tensor:
    """Return W x + update, and + b if `bias`, (T, out) in `dtype`, of rows x (T, in)."""
    if isinstance(rows, Rounded):
        return add_low_rank_(frozen_value(linear, rows, dtype=dtype, bias=bias), update)
    if bias and linear.bias is not None:
        y = torch.addmm(linear.bias, update.low, update.small, alpha=update.scale)
    else:
        y = scaled_matmul(update.low, update.small, update.scale)
    return y.addmm_(rows, linear.dequantize(dtype).t())


def frozen_value(
    linear: FrozenLinear, rows: Operand, *, dtype: torch.dtype, bias: bool
) -> torch.Tensor:
    """Return W x, and + b if `bias`, (T, out) in `dtype`, of rows x (T, in)."""
    if isinstance(rows, Rounded):
        weight = RoundedWeight(_in_float8(linear), _row_scales(linear))
        y = eight_bit_matmul(rows, weight, dtype=dtype)
        return y.add_(linear.bias) if bias and linear.bias is not None else y
    return nn.functional.linear(rows, linear.dequantize(dtype), linear.bias if bias else None)


def frozen_input_gradient(grad: torch.Tensor, linear: FrozenLinear) -> torch.Tensor:
    """Return g W (T, in) for the gradient g (T, out) of a value."""
    if not linear.matmul_precision.backward:
        return grad @ linear.dequantize(grad.dtype)
    return eight_bit_matmul(*_backward_operands(grad, linear), dtype=grad.dtype)


def add_input_gradient_(
    grad_rows: torch.Tensor, grad: torch.Tensor, linear: FrozenLinear
) -> torch.Tensor:
    """Add g W to `grad_rows` (T, in), for the gradient g (T, out) of a value; return it."""
    if not linear.matmul_precision.backward:
        return grad_rows.addmm_(grad, linear.dequantize(grad.dtype))
    return grad_rows.add_(
        eight_bit_matmul(*_backward_operands(grad, linear), dtype=grad_rows.dtype)
    )


def scaled_matmul(
    left: torch.Tensor, right: torch.Tensor, scale: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return scale * left @ right in one operation."""
    # torch has no scaled matmul without a term that is added; with beta=0 it is not even read.
    ignored = left.new_empty(())
    return torch.addmm(ignored, left, right, beta=0, alpha=scale, out=out)


def _backward_operands(grad: torch.Tensor, linear: FrozenLinear) -> tuple[Rounded, RoundedWeight]:
    """Return the operands of g W: the gradient times the rows' scales, and W / s transposed, since
    both must be contiguous along the summed dim."""
    left = rounded(grad, factors=_row_scales(linear))
    return left, RoundedWeight(_in_float8(linear, transposed=True), None)


def _in_float8(linear: FrozenLinear, *, transposed: bool = False) -> torch.Tensor:
    """Return W / s (out, in) in float8, or transposed (in, out)."""

    def decode() -> torch.Tensor:
        shape = linear.spec.shape
        return decoded(linear.stored(), _row_scales(linear), shape, transposed=transposed)

    return linear.kept_or(decode, FLOAT8, transposed=transposed)


def _row_scales(linear: FrozenLinear) -> torch.Tensor:
    if linear.row_scales is None:
        linear.row_scales = row_scales(linear.stored(), linear.spec.shape)
    return linear.row_scales


def frozen_linear(x: torch.Tensor, linear: FrozenLinear, *, bias: bool) -> torch.Tensor:
    """Return x W^T, and + b if `bias`; x: (..., in_features)."""
    multiply: Callable[..., torch.Tensor] = _FrozenLinear.apply
    return multiply(x, linear, bias)


class _FrozenLinear(torch.autograd.Function):
    """x W^T + b. Saves nothing: backward reads the weight from the module again (FSDP has gathered
    it by then). Autograd's own linear would save the decoded, or gathered, weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: FrozenLinear, bias: bool) -> torch.Tensor:
        ctx.linear = linear
        rows = operand(x, linear)
        y = frozen_value(linear, rows, dtype=x.dtype, bias=bias)
        return y.view(*x.shape[:-1], -1).detach()  # no view: a family may change it in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        grad_rows = frozen_input_gradient(grad.reshape(-1, grad.shape[-1]), ctx.linear)
        return grad_rows.view(*grad.shape[:-1], -1), None, None
