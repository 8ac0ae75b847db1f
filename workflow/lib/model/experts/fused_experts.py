"""The experts of a layer in one node: y = sum over a token's experts of p_e down_e(act(up_e(x))).

It replaces a family's module of 3-D parameters (Transformers 5). Backward keeps x (T, hidden), the
routing and up(x) (T * k, 2 * intermediate), and no decoded weight. With two nodes
(`split_autograd`) recomputation skips `down`. The router's weights p get their gradient, frozen or
not. Gates that `kernels.experts.gates` lacks are left to autograd.

A family's class is compared on random values of all magnitudes, and refused if it differs."""

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from workflow.lib.checkpoints.decoder_layers import expert_stacks, matmul_names
from workflow.lib.kernels.experts.gates import (
    CLAMPED,
    GateForm,
    by_torch,
    gated,
    gated_backward_,
    gradients_by_torch_,
)
from workflow.lib.kernels.experts.grouped_matmul import (
    Routing,
    Rows,
    bias_products,
    route,
    sum_by_token,
)
from workflow.lib.kernels.rows.gating import ACTIVATIONS
from workflow.lib.model.experts.expert_matmul import (
    FusedLoraStack,
    Stack,
    adapter_gradients,
    input_gradient,
    low_gradient,
    low_rank,
    stack_of,
    value,
)
from workflow.lib.model.layers.frozen_stack import FrozenStack
from workflow.lib.model.layers.fused_norm import keepable, restored
from workflow.lib.model.layers.split_autograd import apply_split, first_outputs
from workflow.lib.model.layers.token_tiles import TokenTiles
from workflow.lib.model.layers.weight_storage import PlainSpec, WeightStorage
from workflow.lib.model.tried_classes.magnitudes import agree, magnitudes
from workflow.lib.system.errors import UserError


class Gate:
    """The function of a family, (R, 2 f) to (R, f) or without a gate (R, f) to (R, f)."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._function, self.form = function, _form_of(function)

    def product(self, up: torch.Tensor) -> torch.Tensor:
        """Return the function of up(x), for forward."""
        if self.form is not None and gated.takes_kernel(up, self.form):
            return gated(up, self.form)
        return self._function(up)

    def gradients(
        self, up: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the function's value p (R, f), the gradients of up(x) and of the router's weights
        (T, k) fp32. grad: the gradient of p before it is multiplied by a row's weight. `up` and
        `grad` may be overwritten."""
        arguments = (grad, up, weights, routing.order)
        if self.form is not None and gated_backward_.takes_kernel(*arguments, self.form):
            return gated_backward_(*arguments, self.form)
        return gradients_by_torch_(*arguments, self._function)


def _form_of(function: Callable[[torch.Tensor], torch.Tensor]) -> GateForm | None:
    """Return the gate form that kernels compute for the function, by comparison, or None."""
    forms = [GateForm(name) for name in ACTIVATIONS]
    module = getattr(function, "__self__", None)
    alpha, limit = (getattr(module, name, None) for name in ("alpha", "limit"))
    if isinstance(alpha, float) and isinstance(limit, float):
        forms.append(GateForm(CLAMPED, alpha, limit))
    return next((form for form in forms if _agree(function, form)), None)


def _agree(function: Callable[[torch.Tensor], torch.Tensor], form: GateForm) -> bool:
    """Compare a function with a form on random values of all magnitudes."""
    up = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
    return agree(
        lambda magnitude: function(magnitude * up),
        lambda magnitude: by_torch(magnitude * up, form),
        at=magnitudes(function),
        tolerance=1e-6,
    )


class Arguments(NamedTuple):
    """Arguments of `FusedExperts.forward`."""

    hidden_states: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor


class FusedExperts(nn.Module):
    """Experts on two stacks, under the family's names of parameters."""

    tiles: TokenTiles | None = None

    def __init__(
        self,
        stacks: Mapping[str, FrozenStack],
        *,
        biases: Mapping[str, nn.Parameter],
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """stacks: of both matmuls, by name; biases: (experts, out); activation: between matmuls."""
        super().__init__()
        self._names = tuple(stacks)
        for name in self._names:
            self.add_module(name, stacks[name])
        for name, bias in biases.items():
            self.register_parameter(f"{name}_bias", bias)
        self.num_experts, self.gate = stacks[self._names[0]].num_experts, Gate(activation)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return y (T, hidden) of x (T, hidden); top_k_index, top_k_weights: (T, k)."""
        inputs = hidden_states, top_k_index, top_k_weights
        return self.compute(*inputs) if self.tiles is None else self.tiles.output(self, *inputs)

    def compute(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *,
        valued: bool = True,
    ) -> torch.Tensor:
        """Return the same; as `token_tiles.Tiled.compute`."""
        routing = route(top_k_index, num_experts=self.num_experts)
        layers = [self.get_submodule(name) for name in self._names]
        masters = [w for x in layers if isinstance(x, FusedLoraStack) for w in x.fused_weights()]

        def output(up: torch.Tensor) -> torch.Tensor:
            down, product = self.stack(1, up.dtype), Rows(self.gate.product(up))
            y = value(down, product, low_rank(down, product, routing), routing)
            return sum_by_token(y, routing.positions, top_k_weights.detach())

        return apply_split(
            _ExpertsGradient,
            *(hidden_states, top_k_weights, self, routing, *masters),
            value=output,
            valued=valued,
        )

    def stack(self, number: int, dtype: torch.dtype) -> Stack:
        """Return the first (0) or second (1) stack for matmuls in `dtype`."""
        name = self._names[number]
        bias = self._parameters.get(f"{name}_bias")
        return stack_of(self.get_submodule(name), bias=bias, dtype=dtype)


class _ExpertsGradient(torch.autograd.Function):
    """The gradient of the experts. Its intermediate is up(x), with the family's gate in it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        top_k_weights: torch.Tensor,
        experts: FusedExperts,
        routing: Routing,
        *masters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        into, rows = experts.stack(0, x.dtype), Rows(x, by_token=True)
        low = low_rank(into, rows, routing)
        up = value(into, rows, low, routing)
        ctx.norm, source = keepable(x)
        ctx.experts, ctx.top_k = experts, routing.top_k
        ctx.save_for_backward(source, top_k_weights, low, up, *routing[:-1])
        return first_outputs(ctx, x, up, out_features=x.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, top_k_weights, low, up, order, positions, ends, tiles = ctx.saved_tensors
        routing = Routing(order, positions, ends, tiles, ctx.top_k)
        grad_up, grad_weights, down_gradients = _down_gradients(
            ctx.experts, Rows(grads[0], by_token=True), up, top_k_weights, routing
        )
        into = ctx.experts.stack(0, grad_up.dtype)
        grad_low = low_gradient(into, Rows(grad_up), routing)
        into_gradients: list[torch.Tensor] = []
        if into.adapter is not None:
            rows = Rows(restored(ctx.norm, source), by_token=True)
            into_gradients = adapter_gradients(into, Rows(grad_up), rows, (low, grad_low), routing)
            del rows
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_rows = input_gradient(into, Rows(grad_up), grad_low, routing)
            grad_x = sum_by_token(grad_rows, routing.positions, None)
        return grad_x, grad_weights, None, None, *into_gradients, *down_gradients


def _down_gradients(
    experts: FusedExperts,
    grad: Rows,
    up: torch.Tensor,
    top_k_weights: torch.Tensor,
    routing: Routing,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the gradients of up(x), of the router's weights (T, k), and of the second stack's
    adapter, from the gradient of y (T, hidden). The gradient of p_e is grad y_e times y_e: that of
    the product before p_e, times the product."""
    down = experts.stack(1, up.dtype)
    grad_low = low_gradient(down, grad, routing)
    grad_product = input_gradient(down, grad, grad_low, routing)
    product, grad_up, grad_weights = experts.gate.gradients(
        up, grad_product, top_k_weights, routing
    )
    del grad_product
    if down.bias is not None:
        grad_weights += bias_products(grad, down.bias, routing)
    row_weights = top_k_weights.reshape(-1, 1)[routing.order]
    low = low_rank(down, Rows(product), routing)
    weighted = [None if x is None else x.mul_(row_weights) for x in (low, grad_low)]
    lows = (weighted[0], weighted[1])
    adapter_grads = adapter_gradients(down, grad, Rows(product), lows, routing)
    return grad_up, grad_weights.to(top_k_weights.dtype), adapter_grads


# Sizes of compared classes.
EXPERTS, WIDTH, INTERMEDIATE, TOKENS, TOP_K = 3, 16, 8, 7, 2


def replace_experts_(
    model: nn.Module, path: str, specs: Mapping[str, WeightStorage], *, compute_dtype: torch.dtype
) -> None:
    """Replace the experts at `path` of a meta model by `FusedExperts`, stored as `specs`. Raises
    `UserError` if there are none, or their forward computes another function."""
    shapes = {
        name.removeprefix(f"{path}."): stack.shape
        for name, stack in expert_stacks(model).items()
        if name.startswith(f"{path}.")
    }
    for name in {**shapes, **specs}:
        spec = specs.get(name)
        stored = spec and (spec.experts, spec.shape[0] // spec.experts, spec.shape[1])
        if stored is None or stored != shapes.get(name):
            raise UserError(
                f"the base has {path}.{name} as {stored}, the model as "
                f"{shapes.get(name)}: it belongs to another model. Delete its folder below "
                "results/base to have it made again."
            )
    original = model.get_submodule(path)
    _check_family(original, path)
    stacks = {
        name: FrozenStack(specs[name], compute_dtype=compute_dtype)
        for name in matmul_names(original)
    }
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, _fused(original, stacks))


def _fused(original: nn.Module, stacks: Mapping[str, FrozenStack]) -> FusedExperts:
    names = stacks if original.has_bias else ()
    biases = {name: original.get_parameter(f"{name}_bias") for name in names}
    function: Any = original._apply_gate if original.has_gate else original.act_fn
    activation = cast("Callable[[torch.Tensor], torch.Tensor]", function)
    return FusedExperts(stacks, biases=biases, activation=activation)


def _check_family(original: nn.Module, path: str) -> None:
    """Raise `UserError` unless `FusedExperts` computes the forward of the module's class."""
    try:
        same = _computes_the_same(original)
    except (AttributeError, TypeError, RuntimeError):
        same = False
    if not same:
        raise UserError(
            f"{type(original).__name__} ({path}) is not supported: its experts compute something "
            "else than two matmuls with an activation between them. Choose another model.source."
        )


@torch.no_grad()
def _computes_the_same(original: nn.Module) -> bool:
    """Compare the forward of the module's class with `FusedExperts` on random values."""
    draw = torch.Generator().manual_seed(0)
    tiny, stacks = _tiny(original, draw)
    x = torch.randn(TOKENS, WIDTH, generator=draw)
    index = torch.rand(TOKENS, EXPERTS, generator=draw).topk(TOP_K).indices
    chances = torch.rand(TOKENS, TOP_K, generator=draw)
    fused = _fused(tiny, stacks)
    return agree(
        lambda magnitude: tiny(magnitude * x, index, chances),
        lambda magnitude: fused(magnitude * x, index, chances),
        at=magnitudes(original),
        tolerance=1e-4,
    )


def _tiny(original: nn.Module, draw: torch.Generator) -> tuple[nn.Module, dict[str, FrozenStack]]:
    """Return a module of the class with few small experts, and their stacks."""
    tiny: Any = copy.copy(original)
    tiny._parameters, tiny.num_experts = {}, EXPERTS  # the original keeps its own
    tiny.config = SimpleNamespace(_experts_implementation="eager")
    wide = INTERMEDIATE * (2 if original.has_gate else 1)
    stacks = {}
    for name, size in zip(
        matmul_names(original), ((wide, WIDTH), (WIDTH, INTERMEDIATE)), strict=True
    ):
        weights = torch.randn(EXPERTS, *size, generator=draw)
        stacks[name] = _stack(weights)
        stored = weights.transpose(1, 2).contiguous() if original.is_transposed else weights
        setattr(tiny, name, nn.Parameter(stored))
        if original.has_bias:
            bias = torch.randn(EXPERTS, size[0], generator=draw)
            setattr(tiny, f"{name}_bias", nn.Parameter(bias))
    return tiny, stacks


def _stack(weights: torch.Tensor) -> FrozenStack:
    """Return weights (experts, out, in) as a stack on the CPU."""
    experts, out_features, in_features = weights.shape
    spec = PlainSpec((experts * out_features, in_features), torch.float32, experts)
    stack = FrozenStack(spec, compute_dtype=torch.float32)
    stack.weight = nn.Parameter(weights.flatten(), requires_grad=False)
    return stack
