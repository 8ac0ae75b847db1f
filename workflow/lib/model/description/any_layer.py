"""The description of a decoder layer of any kind: experts, recurrent layers, latent attention.

Its linears, stacks of experts and other parameters are known by name. What it keeps for backward is
what autograd was seen to keep when it ran once more with every linear wanting a gradient, as if
each had an adapter. A recurrent layer computes its recurrence by our operations then, if we know
it, and gets many tokens, since recurrences work in chunks of them.
"""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear
from workflow.lib.model.description.layer_calls import Attended, LayerCalls, recorded_layers
from workflow.lib.model.description.layer_parameters import linears_of, others_of, weight_names
from workflow.lib.model.tried_classes.gated_norm_forms import as_gated_norm
from workflow.lib.model.tried_classes.recurrence_functions import recur_by_ours_
from workflow.lib.system.errors import UserError

TOKENS = 1024  # chunks of Mamba 2 and of linear attention have 64 to 256
BYTES = 2  # of an element in 16 bits


def any_layers(
    model: PreTrainedModel, layers: Sequence[LayerCalls], plain: Sequence[DecoderLayer | None]
) -> list[DecoderLayer]:
    """Return the descriptions of all layers: those of `plain`, and what is missing there.

    layers: what each called. Raises `UserError` for experts that cannot be trained.
    """
    if all(plain):
        return [kind for kind in plain if kind]
    linears = [linears_of(model, calls) for calls in layers]
    for calls, found in zip(layers, linears, strict=True):
        _refuse_other_experts(calls, found)
    trained = {
        calls.layer.get_parameter(name)
        for calls, found in zip(layers, linears, strict=True)
        for name in weight_names(found, calls.layer)
    }
    for calls in layers:
        _compute_recurrences_by_ours_(calls.layer)
    again = recorded_layers(model, tokens=TOKENS, trained=trained)
    trios = zip(plain, again, linears, strict=True)
    return [kind or _described(calls, tuple(found)) for kind, calls, found in trios]


def _compute_recurrences_by_ours_(layer: nn.Module) -> None:
    for path, module in list(layer.named_modules()):
        parent, _, name = path.rpartition(".")
        if (gated := as_gated_norm(module)) is not None:
            setattr(layer.get_submodule(parent), name, gated)
        else:
            recur_by_ours_(module)


def _described(calls: LayerCalls, linears: tuple[Linear, ...]) -> DecoderLayer:
    vectors, tensors = others_of(calls, linears)
    attended = calls.attended[0] if calls.attended else NOTHING
    if not linears:
        raise UserError(
            f"in a decoder layer {type(calls.layer).__name__} has no linear whose weights can be "
            "quantized. Choose another model.source."
        )
    top_k = max(calls.top_k.values(), default=0)
    rows = [(top_k if x.experts > 1 else 1, x) for x in linears]
    widths = [n * max(x.in_features, x.out_features // x.experts) for n, x in rows]
    return DecoderLayer(
        attention=calls.attention,
        attention_softcap=attended.arguments.get("softcap") is not None,
        hidden_size=calls.hidden_size,
        intermediate_size=max(calls.widest_kept() // BYTES, *widths, calls.hidden_size),
        num_heads=attended.query[0],
        num_kv_heads=attended.key[0],
        head_dim=attended.query[1],
        linears=linears,
        attention_linears=0,
        vectors=vectors,
        hidden_norms=0,
        norms_before=False,
        norms_after=False,
        head_norms=(),
        norm_bytes=0,
        feed_forward_tensors=0,
        fused_norms=False,
        fused_feed_forward=False,
        tensors=tensors,
        value_dim=attended.value[1] if attended.value[1] != attended.query[1] else None,
        sinks=attended.arguments.get("s_aux") is not None,
        recurrent=any(isinstance(module, nn.Conv1d) for module in calls.layer.modules()),
        top_k=top_k,
        kept_bytes=calls.kept_bytes(""),
    )


NOTHING = Attended("", query=(0, 0), key=(0, 0), value=(0, 0), arguments={})


def _refuse_other_experts(calls: LayerCalls, linears: Sequence[Linear]) -> None:
    """Raise `UserError` for weights (experts, out, in) of a class that Transformers' interface of
    experts does not know.
    """
    for name, shape in others_of(calls, linears)[1]:
        owner = calls.layer.get_submodule(name.rpartition(".")[0])
        if len(shape) > 2 and min(shape) > 1 and not isinstance(owner, nn.Conv1d):
            raise UserError(
                f"in a decoder layer {name} of {type(owner).__name__} is a tensor of shape "
                f"{list(shape)}: experts that run by code of their own cannot be trained. Choose "
                "another model.source."
            )
