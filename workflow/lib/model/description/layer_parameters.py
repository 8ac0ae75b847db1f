"""A layer's parameters by use: linears and stacks are quantized, all others are not."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from workflow.lib.model.architecture.model_shape import Linear
from workflow.lib.model.description.layer_calls import LayerCalls
from workflow.lib.model.layers.expert_stacks import expert_stacks, routers
from workflow.lib.model.lora import takes_adapter
from workflow.lib.model.nf4_model import stored_buffers

Vectors = tuple[tuple[str, int], ...]
Tensors = tuple[tuple[str, tuple[int, ...]], ...]


def linears_of(model: PreTrainedModel, calls: LayerCalls) -> list[Linear]:
    """Return a layer's linears and stacks by order of calls; those only read come last."""
    choosing = routers(calls.layer)
    found = {
        path: Linear(path, module.out_features, module.in_features)
        for path, module in calls.layer.named_modules()
        if isinstance(module, nn.Linear) and takes_adapter(model, path) and path not in choosing
    }
    stacks = sorted(expert_stacks(calls.layer).items(), reverse=True)  # gate and up before down
    found |= {path: _of_stack(path, *stack.shape) for path, stack in stacks}
    places = {path: place for place, path in enumerate(calls.called)}

    def place(linear: Linear) -> int:
        module = linear.path.rpartition(".")[0] if linear.experts > 1 else linear.path
        return places.get(module, len(places))

    return sorted(found.values(), key=place)


def _of_stack(path: str, experts: int, out_features: int, in_features: int) -> Linear:
    return Linear(path, experts * out_features, in_features, experts)


def weight_names(linears: Sequence[Linear], layer: nn.Module) -> set[str]:
    """Return the names of the parameters that linears and stacks are made of."""
    names = {name for name, _ in layer.named_parameters()}
    return {x.path if x.path in names else f"{x.path}.weight" for x in linears}


def others_of(calls: LayerCalls, linears: Sequence[Linear]) -> tuple[Vectors, Tensors]:
    """Return name and elements of other 1-D parameters, name and shape of the rest; buffers too."""
    quantized = weight_names(linears, calls.layer)
    stored = [*calls.layer.named_parameters(), *stored_buffers(calls.layer)]
    others = sorted((name, tuple(x.shape)) for name, x in stored if name not in quantized)
    vectors = tuple((name, shape[0] if shape else 1) for name, shape in others if len(shape) < 2)
    return vectors, tuple((name, shape) for name, shape in others if len(shape) > 1)
