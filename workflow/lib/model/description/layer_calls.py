"""What the decoder layers of a model on the meta device call in a forward: their linears, experts
and attention function, in order.

Tokens have no values there, so a run takes a tenth of a second and no memory, whatever the model's
size. The functions of attention and of experts are ours, which write down what they are given."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from workflow.lib.model.decoder_layers import decoder_layers
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
    """A decoder layer and what it called; paths are within the layer."""

    layer: nn.Module
    chunked: bool = False  # whether its attention sees no further than a chunk of tokens
    called: list[str] = field(default_factory=list)
    """Modules without children, and modules that attend, in order of their ends."""
    attended: list[Attended] = field(default_factory=list)
    top_k: dict[str, int] = field(default_factory=dict)
    """Modules of experts, and how many of these a token takes."""
    hidden_size: int = 0
    hidden_dims: int = 3  # of the hidden states that it takes: (rows, tokens, hidden)

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
    """Run a bf16 model on the meta device, and return what each decoder layer called."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    layers = [
        LayerCalls(layer, chunked=kinds[number : number + 1] == ["chunked_attention"])
        for number, layer in enumerate(decoder_layers(model))
    ]
    places = {}
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    # A mask of all pairs is taken as it is; for any other Transformers asks for values.
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=model.dtype, device="meta")
    with ExitStack() as stack:
        for calls in layers:
            for path, module in calls.layer.named_modules():
                places[module] = calls, path
                _watch(calls, path, module, stack)
        _prepare(model, _Recorder(places))
        stack.enter_context(torch.no_grad())
        decoder: Any = model.get_decoder()
        decoder(input_ids=ids, attention_mask=mask, use_cache=False, **{RECORDER: True})
    return layers


def _watch(calls: LayerCalls, path: str, module: nn.Module, stack: ExitStack) -> None:
    """Write down every call of a module, until the stack is closed."""
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
    """Have attention and experts call us, and rotary tables not ask for positions' values."""
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
    """What the functions of attention and experts write down."""

    places: dict[nn.Module, tuple[LayerCalls, str]]

    def attended(
        self, module: nn.Module, heads: Sequence[torch.Tensor], told: dict[str, Any]
    ) -> None:
        calls, path = self.places[module]
        if getattr(module, "is_causal", True) is False:
            raise UserError(
                "its attention sees the tokens that follow (is_causal = False), so there is no "
                "next token to learn. Choose another model.source."
            )
        query, key, value = ((x.shape[1], x.shape[-1]) for x in heads)
        calls.attended.append(Attended(path, query, key, value, told))

    def routed(self, module: nn.Module, top_k: int) -> None:
        calls, path = self.places[module]
        calls.called.append(path)
        calls.top_k[path] = top_k


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **told: Any
) -> tuple[torch.Tensor, None]:
    """An attention function whose output has the shape of any other's; heads are dim 1."""
    module.workflow_recorder.attended(module, (query, key, value), told)
    output = query.transpose(1, 2)[..., :1].expand(-1, -1, -1, value.shape[-1])
    return output.contiguous(), None  # of which some families ask for a view


def _route(module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, *_: Any) -> torch.Tensor:
    module.workflow_recorder.routed(module, top_k_index.shape[1])
    return torch.empty_like(hidden)


AttentionInterface.register(RECORDER, _attend)
ALL_EXPERTS_FUNCTIONS.register(RECORDER, _route)
