"""What the decoder layers of a model on the meta device call in a forward: their linears, norms,
experts and attention function, in order, and the bytes that autograd would keep of them.

Tokens have no values there, so a run takes a tenth of a second and no memory, whatever the model's
size. The functions of attention and of experts are ours, which write down what they are given.
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
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
    """A call of the attention function: shapes of queries, keys and values (heads, width), and what
    the family tells besides.
    """

    path: str
    query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    arguments: dict[str, Any]


@dataclass
class LayerCalls:
    """A decoder layer and what it called; paths are within the layer."""

    layer: nn.Module
    tokens: int
    chunked: bool = False
    """Whether its attention sees no further than a chunk of tokens."""
    called: list[str] = field(default_factory=list)
    """Modules without children, and modules that attend, in order of their ends."""
    attended: list[Attended] = field(default_factory=list)
    top_k: dict[str, int] = field(default_factory=dict)
    """Modules of experts, and how many of these a token takes."""
    widths: dict[str, int] = field(default_factory=dict)
    """Elements of a token in the output of modules whose output is as large as their input."""
    given: set[int] = field(default_factory=set)
    """Storages of what the layer is given besides its hidden states: all layers share them."""
    kept: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    """Tensors that autograd would keep of a module, by their storage."""
    hidden_size: int = 0
    hidden_dims: int = 3
    """Of the hidden states that it takes: (rows, tokens, hidden)."""

    @property
    def attention(self) -> str:
        """`full`, `sliding` (a window), `chunked` or `none`."""
        if not self.attended:
            return "none"
        if self.chunked:
            return "chunked"
        window = self.attended[0].arguments.get("sliding_window")
        return "full" if window is None else "sliding"

    def kept_bytes(self, path: str, *, width: int = 0) -> int:
        """Bytes by token of tensors of at least `width` elements a token that autograd would keep
        of a module.
        """
        sizes = self._kept_sizes(path)
        return sum(size for size in sizes if size >= 2 * self.tokens * width) // self.tokens

    def widest_kept(self) -> int:
        """Bytes by token of the largest tensor that autograd would keep of the layer."""
        return max(self._kept_sizes(""), default=0) // self.tokens

    def _kept_sizes(self, path: str) -> list[int]:
        tensors = self.kept.get(path, {})
        return [x.untyped_storage().nbytes() for key, x in tensors.items() if key not in self.given]


Running = list[tuple[LayerCalls, str]]


def recorded_layers(
    model: PreTrainedModel,
    *,
    tokens: int = TOKENS,
    trained: AbstractSet[nn.Parameter] = frozenset(),
) -> list[LayerCalls]:
    """Run a frozen bf16 model on the meta device, and return what each decoder layer called.

    trained: parameters that want gradients, so that autograd keeps what they multiply.
    """
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    layers = [
        LayerCalls(layer, tokens, chunked=kinds[number : number + 1] == ["chunked_attention"])
        for number, layer in enumerate(decoder_layers(model))
    ]
    running: Running = []
    places = {}
    weights = {param.untyped_storage()._cdata for param in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in weights:
            for calls, path in running:
                calls.kept.setdefault(path, {})[storage] = tensor
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    # A mask of all pairs is taken as it is; for any other Transformers asks for values.
    mask = torch.zeros(1, 1, tokens, tokens, dtype=model.dtype, device="meta")
    with ExitStack() as stack:
        for calls in layers:
            for path, module in calls.layer.named_modules():
                places[module] = calls, path
                _watch(calls, path, module, running, stack)
        _prepare(model, _Recorder(places, keep if trained else None), stack)
        for param in model.parameters():
            param.requires_grad_(param in trained)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        decoder: Any = model.get_decoder()
        decoder(input_ids=ids, attention_mask=mask, use_cache=False, **{RECORDER: True})
    return layers


def _watch(
    calls: LayerCalls, path: str, module: nn.Module, running: Running, stack: ExitStack
) -> None:
    """Write down every call of a module, until the stack is closed."""
    is_leaf = next(module.children(), None) is None

    def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        running.append((calls, path))
        if not path:
            hidden, *others = (*args, *named.values())
            calls.hidden_size, calls.hidden_dims = hidden.shape[-1], hidden.dim()
            calls.given.update(x.untyped_storage()._cdata for x in _tensors([others]))

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running.pop()
        if is_leaf or (calls.attended and calls.attended[-1].path == path):
            calls.called.append(path)
        taken = args[0] if args else None
        if not isinstance(taken, torch.Tensor) or not isinstance(output, torch.Tensor):
            return
        if is_leaf and taken.shape == output.shape:
            calls.widths[path] = output.numel() // calls.tokens

    stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
    stack.enter_context(module.register_forward_hook(after))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, and in sequences and mappings in it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _prepare(model: PreTrainedModel, recorder: "_Recorder", stack: ExitStack) -> None:
    """Have a model's hidden states want gradients, its attention and experts call us, and its
    rotary tables not ask for the values of positions.
    """
    model.eval()
    embedding = model.get_input_embeddings()
    stack.enter_context(embedding.register_forward_hook(lambda *call: call[-1].requires_grad_()))
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
    """What the functions of attention and experts write down; `keep` is told what attention keeps,
    if anybody asks.
    """

    places: dict[nn.Module, tuple[LayerCalls, str]]
    keep: Callable[[torch.Tensor], torch.Tensor] | None

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
        if self.keep is not None:
            for x in heads:
                self.keep(x)

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


def _route(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """A function of experts that keeps what ours does: hidden (tokens, h), the router's weights,
    and of each row the value of the first stack.
    """
    module.workflow_recorder.routed(module, top_k_index.shape[1])
    stack = module.gate_up_proj if module.has_gate else module.up_proj
    wide = hidden.new_empty(top_k_index.numel(), stack.shape[2 if module.is_transposed else 1])
    output: torch.Tensor = _Experts.apply(hidden, top_k_weights, wide)  # type: ignore[no-untyped-call]
    return output


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, top_k_weights: torch.Tensor, wide: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, top_k_weights, wide)
        return torch.empty_like(hidden)


AttentionInterface.register(RECORDER, _attend)
ALL_EXPERTS_FUNCTIONS.register(RECORDER, _route)
