"""Matmuls of frozen stacks of experts with LoRA adapters on top, and their gradients.

y = W_e x + s B_e A_e x + b_e for a row x that goes to expert e: `lora_matmul` for stacks. Weights
are decoded by slices (`frozen_stack`); no update (out, in) of an expert is ever made. A and B are
fp32 masters with gradients in fp32 (without our kernels a GPU rounds these once a micro-batch).

In float8 an expert's weights have one scale: e4m3 keeps its digits down to 1/28,000 of the largest
value, and a token's gradient is rounded once, not once for each of its experts.

An adapter for each expert has the layout that PEFT gives the adapter of a 3-D parameter.
`ParamWrapper` (0.21) keeps the A of all experts one below the other, (experts * r, in). In their B
(out, r * experts) the experts alternate: column i is column i // experts of expert i % experts."""

from typing import Any, NamedTuple

import torch
from torch import nn

from workflow.lib.kernels.eight_bits.matmul import (
    FLOAT8,
    StoredStack,
    columns_in_float8,
    rounded,
    row_scales,
    rows_in_float8,
)
from workflow.lib.kernels.experts.grouped_matmul import (
    ROW_UNIT,
    Routing,
    Rows,
    Update,
    Weights,
    rows_matmul,
    transposed,
    weights_matmul,
)
from workflow.lib.model.layers.frozen_stack import FrozenStack
from workflow.lib.model.layers.lora_linear import FusedLoraLinear
from workflow.lib.system.device_types import GPUS


class FusedLoraStack(FusedLoraLinear):
    """Adapters of all experts of a stack; `expert_matmul` computes them."""

    def update_layer(self, adapter_name: str, r: int, *args: Any, **kwargs: Any) -> None:
        """Give the layer the adapter `adapter_name` of rank `r` for each expert."""
        super().update_layer(adapter_name, r, *args, **kwargs)
        stack = self.stack()
        rank = stack.num_experts * r
        sizes = {"lora_A": (stack.in_features, rank), "lora_B": (rank, stack.expert_rows)}
        for name, (in_features, out_features) in sizes.items():
            weight = getattr(self, name)[adapter_name].weight
            linear = nn.Linear(in_features, out_features, bias=False, device=weight.device)
            linear.requires_grad_(weight.requires_grad)
            getattr(self, name)[adapter_name] = linear

    def stack(self) -> FrozenStack:
        base = self.get_base_layer()
        assert isinstance(base, FrozenStack)
        return base

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Never called: a token goes to some of the experts (`fused_experts`)."""
        raise NotImplementedError("which experts x goes to is not known here")


def operand(rows: Rows, *, float8: bool) -> Rows:
    """Return rows as operands of a matmul."""
    if not float8:
        return rows
    made = rounded(rows.values)
    return Rows(made.values, rows.by_token, made.scales)


def row_weights(
    base: FrozenStack, start: int, stop: int, *, float8: bool, dtype: torch.dtype
) -> Weights:
    """Return rows `start` to `stop` of every expert (experts, stop - start, in), for y."""
    if not float8:
        return Weights(base.dequantize_rows(start, stop, dtype))
    values = base.kept_or(lambda: rows_in_float8(*_stored(base), start, stop), FLOAT8)
    return Weights(values, _scales(base))


def column_weights(
    base: FrozenStack, start: int, stop: int, *, float8: bool, dtype: torch.dtype
) -> Weights:
    """Return columns `start` to `stop` of every expert, transposed, for the gradient of x."""
    if not float8:
        return Weights(base.dequantize_columns(start, stop, dtype).transpose(1, 2))
    values = base.kept_or(
        lambda: columns_in_float8(*_stored(base), start, stop), FLOAT8, transposed=True
    )
    return Weights(values, _scales(base))


def _stored(base: FrozenStack) -> tuple[StoredStack, torch.Tensor]:
    """Return the stored weights with their scales."""
    stack = StoredStack(base.stored(), base.num_experts, base.expert_rows, base.in_features)
    return stack, _scales(base)


def _scales(base: FrozenStack) -> torch.Tensor:
    """Return each expert's scale (experts,) fp32, computed at first use."""
    if base.row_scales is None:
        by_expert = (base.num_experts, base.expert_rows * base.in_features)
        base.row_scales = row_scales(base.stored(), by_expert)
    return base.row_scales


class Adapter(NamedTuple):
    """The adapters of all experts in the compute dtype, as one pass uses them."""

    a: torch.Tensor  # (experts, r, in), on GPUs with r padded by zeros to whole `ROW_UNIT`s
    b: torch.Tensor  # (experts, out, r)
    scale: float  # of B A
    rank: int  # without padding


class Stack(NamedTuple):
    """A stack as one pass uses it: FSDP frees and regathers its weights."""

    base: FrozenStack
    bias: torch.Tensor | None  # (experts, out)
    adapter: Adapter | None


def stack_of(layer: nn.Module, *, bias: torch.Tensor | None, dtype: torch.dtype) -> Stack:
    """Read the weights of an `FrozenStack`, or of the PEFT layer on it."""
    if isinstance(layer, FrozenStack):
        return Stack(layer, bias, None)
    assert isinstance(layer, FusedLoraStack)
    if layer.disable_adapters:
        return Stack(layer.stack(), bias, None)
    assert layer.can_share_node(), "experts have one adapter, not merged, without bias and DoRA"
    a, b = (_cast(weight, layer, dtype) for weight in layer.fused_weights())
    rank = layer.fused_weights()[0].shape[0] // layer.stack().num_experts
    return Stack(layer.stack(), bias, Adapter(a, b, layer.fused_scale(), rank))


def _cast(weight: torch.Tensor, layer: FusedLoraStack, dtype: torch.dtype) -> torch.Tensor:
    """Return masters by expert in the compute dtype; from the layer's casts, if it keeps them."""
    casts, key = layer.shared.casts(), (dtype, id(weight))
    if casts is not None and key in casts:
        return casts[key]
    experts, is_a = layer.stack().num_experts, weight is layer.fused_weights()[0]
    if is_a:
        cast = weight.to(dtype, copy=True).view(experts, -1, weight.shape[1])
    else:
        alternating = weight.view(-1, experts)
        cast = transposed(weight.new_empty(alternating.shape[::-1], dtype=dtype), alternating)
        cast = cast.view(experts, weight.shape[0], -1)
    rank_dim = 1 if is_a else 2
    lacking = -cast.shape[rank_dim] % ROW_UNIT
    if lacking and weight.device.type in GPUS:
        cast = nn.functional.pad(cast, (0, 0, 0, lacking) if is_a else (0, lacking))
    if casts is not None:
        casts[key] = cast
    return cast


def low_rank(stack: Stack, rows: Rows, routing: Routing) -> torch.Tensor | None:
    """Return A x (R, r) of rows (R, in); None without adapter."""
    return stack.adapter and rows_matmul(rows, Weights(stack.adapter.a), routing)


def value(stack: Stack, rows: Rows, low: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    """Return y (R, out) of rows (R, in), for low = A x."""
    base, dtype = stack.base, rows.values.dtype
    float8 = base.matmul_precision.forward
    operand_rows = operand(rows, float8=float8)
    y = rows.values.new_empty(len(routing.order), stack.base.expert_rows)
    for start, stop in base.row_slices(FLOAT8 if float8 else dtype):
        update = None
        if stack.adapter is not None:
            assert low is not None
            update = Update(low, stack.adapter.b[:, start:stop], stack.adapter.scale)
        rows_matmul(
            operand_rows,
            row_weights(base, start, stop, float8=float8, dtype=dtype),
            routing,
            update=update,
            bias=None if stack.bias is None else stack.bias[:, start:stop],
            out=y[:, start:stop],
        )
    return y


def low_gradient(stack: Stack, grad: Rows, routing: Routing) -> torch.Tensor | None:
    """Return the gradient of `low_rank` (R, r) from the value's gradient (R, out)."""
    if stack.adapter is None:
        return None
    grad_low = rows_matmul(grad, Weights(stack.adapter.b.transpose(1, 2)), routing)
    return grad_low.mul_(stack.adapter.scale)


def input_gradient(
    stack: Stack, grad: Rows, grad_low: torch.Tensor | None, routing: Routing
) -> torch.Tensor:
    """Return the gradient of the rows (R, in) from the gradients of the value and of `low_rank`."""
    base, dtype = stack.base, grad.values.dtype
    float8 = base.matmul_precision.backward
    operand_rows = operand(grad, float8=float8)
    grad_rows = grad.values.new_empty(len(routing.order), base.in_features)
    for start, stop in base.column_slices(FLOAT8 if float8 else dtype):
        update = None
        if stack.adapter is not None:
            assert grad_low is not None
            update = Update(grad_low, stack.adapter.a[:, :, start:stop].transpose(1, 2), 1.0)
        weights = column_weights(base, start, stop, float8=float8, dtype=dtype)
        rows_matmul(operand_rows, weights, routing, update=update, out=grad_rows[:, start:stop])
        del weights  # before the next slice is decoded
    return grad_rows


def adapter_gradients(
    stack: Stack,
    grad: Rows,
    rows: Rows,
    lows: tuple[torch.Tensor | None, torch.Tensor | None],
    routing: Routing,
) -> list[torch.Tensor]:
    """Return the gradients of A and B, fp32, none without adapter; lows: A x, its gradient."""
    low, grad_low = lows
    if stack.adapter is None or low is None or grad_low is None:
        return []
    experts, rank = stack.base.num_experts, stack.adapter.rank
    sums = low.new_empty(0, dtype=torch.float32)
    grad_a = sums.new_empty(experts, rank, stack.base.in_features)
    weights_matmul(grad_a, grad_low, rows, routing, 1.0)
    grad_b = sums.new_empty(experts, stack.base.expert_rows, rank)
    weights_matmul(grad_b.transpose(1, 2), low, grad, routing, stack.adapter.scale)
    alternating = transposed(sums.new_empty(grad_b[0].numel(), experts), grad_b.flatten(1))
    return [grad_a.flatten(0, 1), alternating.view(stack.base.expert_rows, -1)]
