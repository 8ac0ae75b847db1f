"""What the decoder layers of a model on the meta device call in a forward: their linears, norms and
attention function, in order, and the bytes that autograd would keep of them.

Tokens have no values there, so a run takes a tenth of a second and no memory, whatever the model's
size. The attention function is one of ours, which writes down what it is given.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from workflow.lib.model.decoder_layers import decoder_layers

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
    called: list[str] = field(default_factory=list)
    """Modules without children, and modules that attend, in order of their ends."""
    attended: list[Attended] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)
    """Elements of a token in the output of modules whose output is as large as their input."""
    kept: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    """Tensors that autograd would keep of a module, by their storage."""

    def kept_bytes(self, path: str, *, width: int) -> int:
        """Bytes by token of tensors of at least `width` elements a token that autograd would keep
        of a module.
        """
        storages = (tensor.untyped_storage() for tensor in self.kept.get(path, {}).values())
        sizes = (storage.nbytes() for storage in storages)
        return sum(size for size in sizes if size >= 2 * TOKENS * width) // TOKENS


def recorded_layers(model: PreTrainedModel) -> list[LayerCalls]:
    """Run a frozen bf16 model on the meta device, and return what each decoder layer called."""
    layers = [LayerCalls(layer) for layer in decoder_layers(model)]
    running: list[tuple[LayerCalls, str]] = []
    places = {}
    for calls in layers:
        for path, module in calls.layer.named_modules():
            places[module] = calls, path
            _watch(calls, path, module, running)
    _prepare(model, places)

    weights = {param.untyped_storage()._cdata for param in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in weights:
            for calls, path in running:
                calls.kept.setdefault(path, {})[storage] = tensor
        return tensor

    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    # A mask of all pairs is taken as it is; for any other Transformers asks for values.
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=model.dtype, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    return layers


def _watch(
    calls: LayerCalls, path: str, module: nn.Module, running: list[tuple[LayerCalls, str]]
) -> None:
    """Write down every call of a module."""
    is_leaf = next(module.children(), None) is None

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        running.append((calls, path))

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running.pop()
        if is_leaf or (calls.attended and calls.attended[-1].path == path):
            calls.called.append(path)
        taken = args[0] if args else None
        if not isinstance(taken, torch.Tensor) or not isinstance(output, torch.Tensor):
            return
        if is_leaf and taken.shape == output.shape:
            calls.widths[path] = output.numel() // TOKENS

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _prepare(model: PreTrainedModel, places: dict[nn.Module, tuple[LayerCalls, str]]) -> None:
    """Have a model's hidden states want gradients, its attention call us, and its rotary tables not
    ask for the values of positions.
    """
    model.requires_grad_(False)
    model.eval()
    model.get_input_embeddings().register_forward_hook(lambda *call: call[-1].requires_grad_())
    model.config._attn_implementation = RECORDER
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is not None:
            simple = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
            module.rope_type = simple  # type: ignore[assignment]
        module.workflow_places = places  # type: ignore[assignment]


def _recorder(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **told: Any
) -> tuple[torch.Tensor, None]:
    """An attention function whose output has the shape of any other's; heads are dim 1."""
    calls, path = module.workflow_places[module]
    of_query, of_key, of_value = ((x.shape[1], x.shape[-1]) for x in (query, key, value))
    calls.attended.append(Attended(path, of_query, of_key, of_value, told))
    return query.transpose(1, 2)[..., :1].expand(-1, -1, -1, value.shape[-1]), None


AttentionInterface.register(RECORDER, _recorder)
