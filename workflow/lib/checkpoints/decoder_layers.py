"""The decoder layers of a model, the parts beside them, and the experts inside of them.

The experts of a mixture are as Transformers 5 keeps them: one module a layer, whose parameters
(experts, out, in), or (experts, in, out) where the module says `is_transposed`, are the stacks.
Recognized by the attributes that `transformers.integrations.moe.use_experts_implementation` gives
such a module, so no family is named here."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from workflow.lib.system.errors import UserError


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks, by Transformers' `_no_split_modules` (FSDP2 makes subclasses)."""
    names = set(model._no_split_modules or ())
    layers = [
        module
        for module in model.modules()
        if names & {kind.__name__ for kind in type(module).__mro__}
        and not isinstance(module, nn.Embedding)
    ]
    if not layers:
        raise UserError(
            f"{type(model).__name__} names no decoder layer class (_no_split_modules): this model "
            "family cannot be sharded. Choose another model.source."
        )
    return layers


def other_parts(model: PreTrainedModel) -> list[str]:
    """Return the paths of parts without text (a vision tower), embedding and head."""
    text = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    paths = [path for path, module in model.named_modules() if any(module is t for t in text)]
    parts: list[str] = []
    for path, _ in model.named_modules():
        inside = any(not x or f"{path}.".startswith(f"{x}.") for x in (*paths, *parts))
        around = any(f"{x}.".startswith(f"{path}.") for x in paths) or not path
        if not inside and not around:
            parts.append(path)
    return parts


def drop_other_parts_(model: PreTrainedModel) -> None:
    """Take those parts out of a meta-device model: they are neither allocated nor sharded."""
    for path in other_parts(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, None)


@dataclass(frozen=True)
class ExpertStack:
    """One projection's weights of all experts, `shape` (experts, out, in); `transposed`: stored."""

    shape: tuple[int, int, int]
    transposed: bool


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of the experts of every layer that has some."""
    for path, module in model.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            yield path, module


def matmul_names(experts: nn.Module) -> tuple[str, str]:
    """Return the names of the weights of the first matmul and of the second."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def expert_stacks(model: nn.Module) -> dict[str, ExpertStack]:
    """Return every stack by the path of its parameter (`model.layers.0.mlp.experts.down_proj`)."""
    return {
        f"{path}.{name}": _stack(param, transposed=bool(module.is_transposed))
        for path, module in experts_modules(model)
        for name, param in module.named_parameters(recurse=False)
        if param.dim() == 3
    }


def _stack(param: nn.Parameter, *, transposed: bool) -> ExpertStack:
    experts, first, second = param.shape
    shape = (experts, second, first) if transposed else (experts, first, second)
    return ExpertStack(shape, transposed)


def routers(model: nn.Module) -> set[str]:
    """Return the paths of the linears that choose the experts: beside them, one output an expert.
    Most families' routers are no linears but modules of their own."""
    paths = set()
    for path, experts in experts_modules(model):
        (num_experts, *_), *_ = (p.shape for p in experts.parameters() if p.dim() == 3)
        parent = path.rpartition(".")[0]
        paths |= {
            f"{parent}.{name}" if parent else name
            for name, module in model.get_submodule(parent).named_modules()
            if isinstance(module, nn.Linear) and module.out_features == num_experts
        }
    return paths
