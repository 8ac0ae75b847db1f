"""What takes the place of an experts module of Transformers (`expert_stacks`).

Its class is tried on random values of all magnitudes: a family whose experts compute something else
is refused."""

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from bitsandbytes.functional import quantize_4bit
from torch import nn

from workflow.lib.model.experts.fused_experts import FusedExperts
from workflow.lib.model.layers.expert_stacks import expert_stacks, matmul_names
from workflow.lib.model.layers.nf4_linear import NF4Spec
from workflow.lib.model.layers.nf4_stack import NF4Stack
from workflow.lib.model.tried_classes.magnitudes import agree, magnitudes
from workflow.lib.system.errors import UserError

# Of the values that a class is tried on: every expert has whole blocks of weights.
EXPERTS, WIDTH, INTERMEDIATE, TOKENS, TOP_K, BLOCK_SIZE = 3, 16, 8, 7, 2, 64


def replace_experts_(
    model: nn.Module, path: str, specs: Mapping[str, NF4Spec], *, compute_dtype: torch.dtype
) -> None:
    """Put `FusedExperts` in the place of the experts at `path` of a meta model, packed as `specs`.
    Raises `UserError` if there are none, or they compute something else."""
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
                f"the NF4 checkpoint has {path}.{name} as {stored}, the model as "
                f"{shapes.get(name)}: it belongs to another model. Delete its folder below "
                "results/base to have it made again."
            )
    original = model.get_submodule(path)
    _check_family(original, path)
    stacks = {
        name: NF4Stack(specs[name], compute_dtype=compute_dtype) for name in matmul_names(original)
    }
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, _fused(original, stacks))


def _fused(original: nn.Module, stacks: Mapping[str, NF4Stack]) -> FusedExperts:
    names = stacks if original.has_bias else ()
    biases = {name: original.get_parameter(f"{name}_bias") for name in names}
    function: Any = original._apply_gate if original.has_gate else original.act_fn
    activation = cast("Callable[[torch.Tensor], torch.Tensor]", function)
    return FusedExperts(stacks, biases=biases, activation=activation)


def _check_family(original: nn.Module, path: str) -> None:
    """Raise `UserError` unless the forward of the module's class is what `FusedExperts` makes."""
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


def _tiny(original: nn.Module, draw: torch.Generator) -> tuple[nn.Module, dict[str, NF4Stack]]:
    """Return a module of the class with few small experts, and their stacks."""
    tiny: Any = copy.copy(original)
    tiny._parameters, tiny.num_experts = {}, EXPERTS  # the original keeps its own
    tiny.config = SimpleNamespace(_experts_implementation="eager")
    wide = INTERMEDIATE * (2 if original.has_gate else 1)
    stacks = {}
    for name, size in zip(
        matmul_names(original), ((wide, WIDTH), (WIDTH, INTERMEDIATE)), strict=True
    ):
        stacks[name] = _packed(torch.randn(EXPERTS, *size, generator=draw))
        weights = stacks[name].dequantize_experts(0, EXPERTS, torch.float32)
        stored = weights.transpose(1, 2).contiguous() if original.is_transposed else weights
        setattr(tiny, name, nn.Parameter(stored))
        if original.has_bias:
            bias = torch.randn(EXPERTS, size[0], generator=draw)
            setattr(tiny, f"{name}_bias", nn.Parameter(bias))
    return tiny, stacks


def _packed(weights: torch.Tensor) -> NF4Stack:
    """Return weights (experts, out, in) as a stack on the CPU."""
    experts, out_features, in_features = weights.shape
    shape = (experts * out_features, in_features)
    packed, state = quantize_4bit(weights.view(shape), blocksize=BLOCK_SIZE, quant_type="nf4")
    spec = NF4Spec(shape, BLOCK_SIZE, double_quant=False, offset=0.0, experts=experts)
    stack = NF4Stack(spec, compute_dtype=torch.float32)
    stack.weight = nn.Parameter(packed.flatten().view(torch.float32), requires_grad=False)
    stack.absmax = nn.Parameter(state.absmax, requires_grad=False)
    stack.quant_map = state.code
    return stack
