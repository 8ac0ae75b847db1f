"""The calls of a model's decoder layers in a forward on meta: linears, experts and attention, in
order; and the description made from them (`described_layers`).

Tokens have no values on meta, so a run takes a tenth of a second and no memory at any model size.
Functions of this module replace attention and experts, and record their arguments."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from workflow.lib.checkpoints.decoder_layers import decoder_layers, expert_stacks, routers
from workflow.lib.model.adaptable_linears import takes_adapter
from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear
from workflow.lib.model.nf4_model import stored_buffers
from workflow.lib.system.errors import UserError

TOKENS = 5
RECORDER = "workflow_layer_calls"


@dataclass(frozen=True)
class Attended:
    """A call of the attention function: shapes (heads, width) of q, k, v; other arguments."""

    path: str
    query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    arguments: dict[str, Any]


@dataclass
class LayerCalls:
    """A decoder layer and its calls; paths are within the layer."""

    layer: nn.Module
    chunked: bool = False  # whether its attention sees no further than a chunk of tokens
    called: list[str] = field(default_factory=list)
    """Modules without children, and attention modules, in order of their ends."""
    attended: list[Attended] = field(default_factory=list)
    top_k: dict[str, int] = field(default_factory=dict)
    """Modules of experts, and the number of experts per token."""
    hidden_size: int = 0
    hidden_dims: int = 3  # of its input, the hidden states: (rows, tokens, hidden)

    @property
    def attention(self) -> str:
        """`full`, `sliding` (a window), `chunked` or `none`."""
        if not self.attended:
            return "none"
        if self.chunked:
            return "chunked"
        window = self.attended[0].arguments.get("sliding_window")
        return "full" if window is None else "sliding"


def recorded_layers(model: PreTrainedModel) -> list[LayerCalls]:
    """Run a bf16 model on the meta device, and return the calls of each decoder layer."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    layers = [
        LayerCalls(layer, chunked=kinds[number : number + 1] == ["chunked_attention"])
        for number, layer in enumerate(decoder_layers(model))
    ]
    calls_by_module = {}
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    # A 4-D mask is used as it is; for any other Transformers reads values.
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=model.dtype, device="meta")
    with ExitStack() as stack:
        for calls in layers:
            for path, module in calls.layer.named_modules():
                calls_by_module[module] = calls, path
                _watch(calls, path, module, stack)
        _prepare(model, _Recorder(calls_by_module))
        stack.enter_context(torch.no_grad())
        decoder: Any = model.get_decoder()
        made = decoder(input_ids=ids, attention_mask=mask, use_cache=False, **{RECORDER: True})
    if hasattr(made, "logits"):
        raise UserError(
            f"its decoder {type(decoder).__name__} returns logits, and no hidden states. Choose "
            "another model.source."
        )
    return layers


def _watch(calls: LayerCalls, path: str, module: nn.Module, stack: ExitStack) -> None:
    """Record every call of a module, until the stack is closed."""
    is_leaf = next(module.children(), None) is None

    def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden, *_others = (*args, *named.values())
        calls.hidden_size, calls.hidden_dims = hidden.shape[-1], hidden.dim()

    def after(*_: Any) -> None:
        if is_leaf or (calls.attended and calls.attended[-1].path == path):
            calls.called.append(path)

    if not path:
        stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
    stack.enter_context(module.register_forward_hook(after))


def _prepare(model: PreTrainedModel, recorder: "_Recorder") -> None:
    """Replace attention and experts by this module's; rotary tables then read no positions."""
    model.eval()
    model.config._attn_implementation = RECORDER
    model.config._experts_implementation = RECORDER
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is not None:
            simple = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
            module.rope_type = simple  # type: ignore[assignment]
        module.workflow_recorder = recorder  # type: ignore[assignment]


@dataclass(frozen=True)
class _Recorder:
    """Records the calls of attention and experts."""

    calls_by_module: dict[nn.Module, tuple[LayerCalls, str]]

    def attended(
        self, module: nn.Module, heads: Sequence[torch.Tensor], arguments: dict[str, Any]
    ) -> None:
        calls, path = self.calls_by_module[module]
        if getattr(module, "is_causal", True) is False:
            raise UserError(
                "its attention sees the tokens that follow (is_causal = False), so there is no "
                "next token to learn. Choose another model.source."
            )
        query, key, value = ((x.shape[1], x.shape[-1]) for x in heads)
        calls.attended.append(Attended(path, query, key, value, arguments))

    def routed(self, module: nn.Module, top_k: int) -> None:
        calls, path = self.calls_by_module[module]
        calls.called.append(path)
        calls.top_k[path] = top_k


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function whose output has the shape of any other's; heads are dim 1."""
    module.workflow_recorder.attended(module, (query, key, value), arguments)
    output = query.transpose(1, 2)[..., :1].expand(-1, -1, -1, value.shape[-1])
    return output.contiguous(), None  # some families take a view of it


def _route(module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, *_: Any) -> torch.Tensor:
    module.workflow_recorder.routed(module, top_k_index.shape[1])
    return torch.empty_like(hidden)


AttentionInterface.register(RECORDER, _attend)
ALL_EXPERTS_FUNCTIONS.register(RECORDER, _route)


Vectors = tuple[tuple[str, int], ...]
Tensors = tuple[tuple[str, tuple[int, ...]], ...]


def linears_of(model: PreTrainedModel, calls: LayerCalls) -> list[Linear]:
    """Return a layer's linears and stacks in order of calls; those without a call come last."""
    choosing = routers(calls.layer)
    linears = {
        path: Linear(path, module.out_features, module.in_features)
        for path, module in calls.layer.named_modules()
        if isinstance(module, nn.Linear) and takes_adapter(model, path) and path not in choosing
    }
    stacks = sorted(expert_stacks(calls.layer).items(), reverse=True)  # gate and up before down
    for path, stack in stacks:
        experts, out_features, in_features = stack.shape
        linears[path] = Linear(path, experts * out_features, in_features, experts)
    call_order = {path: index for index, path in enumerate(calls.called)}

    def number(linear: Linear) -> int:
        module = linear.path.rpartition(".")[0] if linear.experts > 1 else linear.path
        return call_order.get(module, len(call_order))

    return sorted(linears.values(), key=number)


def others_of(calls: LayerCalls, linears: Sequence[Linear]) -> tuple[Vectors, Tensors]:
    """Return name and elements of other 1-D tensors, name and shape of the rest; buffers too."""
    params = dict(calls.layer.named_parameters())
    quantized = {x.path if x.path in params else f"{x.path}.weight" for x in linears}
    stored = [*params.items(), *stored_buffers(calls.layer)]
    others = sorted((name, tuple(x.shape)) for name, x in stored if name not in quantized)
    vectors = tuple((name, shape[0] if shape else 1) for name, shape in others if len(shape) < 2)
    return vectors, tuple((name, shape) for name, shape in others if len(shape) > 1)


NOTHING = Attended("", query=(0, 0), key=(0, 0), value=(0, 0), arguments={})


def described_layers(model: PreTrainedModel, layers: Sequence[LayerCalls]) -> list[DecoderLayer]:
    """Describe every layer on meta from its calls; raises `UserError` for untrainable ones."""
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
    """Raise `UserError` for layers without linears, unshareable heads, a single expert, and unknown
    experts."""
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
    if any(stack.shape[0] == 1 for stack in expert_stacks(calls.layer).values()):
        raise UserError(
            "its mixtures have one expert, so no router chooses anything. Publish it as a dense "
            "model of its family, or choose another model.source."
        )
    for name, shape in others_of(calls, linears)[1]:
        owner = calls.layer.get_submodule(name.rpartition(".")[0])
        if len(shape) > 2 and min(shape) > 1 and not isinstance(owner, nn.Conv1d):
            raise UserError(
                f"in a decoder layer {name} of {type(owner).__name__} is a tensor of shape "
                f"{list(shape)}: experts that run by code of their own cannot be trained. Choose "
                "another model.source."
            )
