"""From what a decoder layer called (`layer_calls`) to its description (`DecoderLayer`)."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear
from workflow.lib.model.description.layer_calls import Attended, LayerCalls
from workflow.lib.model.layers.expert_stacks import expert_stacks, routers
from workflow.lib.model.lora import takes_adapter
from workflow.lib.model.nf4_model import stored_buffers
from workflow.lib.system.errors import UserError

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
    for path, stack in stacks:
        experts, out_features, in_features = stack.shape
        found[path] = Linear(path, experts * out_features, in_features, experts)
    places = {path: place for place, path in enumerate(calls.called)}

    def place(linear: Linear) -> int:
        module = linear.path.rpartition(".")[0] if linear.experts > 1 else linear.path
        return places.get(module, len(places))

    return sorted(found.values(), key=place)


def others_of(calls: LayerCalls, linears: Sequence[Linear]) -> tuple[Vectors, Tensors]:
    """Return name and elements of other 1-D parameters, name and shape of the rest; buffers too."""
    params = dict(calls.layer.named_parameters())
    quantized = {x.path if x.path in params else f"{x.path}.weight" for x in linears}
    stored = [*params.items(), *stored_buffers(calls.layer)]
    others = sorted((name, tuple(x.shape)) for name, x in stored if name not in quantized)
    vectors = tuple((name, shape[0] if shape else 1) for name, shape in others if len(shape) < 2)
    return vectors, tuple((name, shape) for name, shape in others if len(shape) > 1)


NOTHING = Attended("", query=(0, 0), key=(0, 0), value=(0, 0), arguments={})


def described_layers(model: PreTrainedModel, layers: Sequence[LayerCalls]) -> list[DecoderLayer]:
    """Describe every layer on meta by what it called; raises `UserError` for untrainable ones."""
    return [_described(calls, tuple(linears_of(model, calls))) for calls in layers]


def _described(calls: LayerCalls, linears: tuple[Linear, ...]) -> DecoderLayer:
    attended = calls.attended[0] if calls.attended else NOTHING
    _check(calls, linears, attended)
    vectors, tensors = others_of(calls, linears)
    return DecoderLayer(
        attention=calls.attention,
        attention_softcap=attended.arguments.get("softcap") is not None,
        hidden_size=calls.hidden_size,
        num_heads=attended.query[0],
        num_kv_heads=attended.key[0],
        head_dim=attended.query[1],
        linears=linears,
        vectors=vectors,
        tensors=tensors,
        value_dim=attended.value[1] if attended.value[1] != attended.query[1] else None,
        sinks=attended.arguments.get("s_aux") is not None,
        recurrent=any(isinstance(module, nn.Conv1d) for module in calls.layer.modules()),
        top_k=max(calls.top_k.values(), default=0),
    )


def _check(calls: LayerCalls, linears: Sequence[Linear], attended: Attended) -> None:
    """Raise `UserError` for layers without linears, unshareable heads, and unknown experts."""
    if not linears:
        raise UserError(
            f"in a decoder layer {type(calls.layer).__name__} has no linear whose weights can be "
            "quantized. Choose another model.source."
        )
    if attended.key[0] and attended.query[0] % attended.key[0]:
        raise UserError(
            f"{attended.query[0]} query heads cannot share {attended.key[0]} key heads equally. "
            "Give the config.json that belongs to the checkpoint (model.source)."
        )
    for name, shape in others_of(calls, linears)[1]:
        owner = calls.layer.get_submodule(name.rpartition(".")[0])
        if len(shape) > 2 and min(shape) > 1 and not isinstance(owner, nn.Conv1d):
            raise UserError(
                f"in a decoder layer {name} of {type(owner).__name__} is a tensor of shape "
                f"{list(shape)}: experts that run by code of their own cannot be trained. Choose "
                "another model.source."
            )
