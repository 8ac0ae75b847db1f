"""From what a decoder layer called (`layer_calls`) to its description (`DecoderLayer`)."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear
from workflow.lib.model.description.layer_calls import Attended, LayerCalls
from workflow.lib.model.description.layer_parameters import linears_of, others_of
from workflow.lib.system.errors import UserError

NOTHING = Attended("", query=(0, 0), key=(0, 0), value=(0, 0), arguments={})


def described_layers(model: PreTrainedModel, layers: Sequence[LayerCalls]) -> list[DecoderLayer]:
    """Return the description of every decoder layer of a model on the meta device, by what it
    called; raises `UserError` for what cannot be trained."""
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
