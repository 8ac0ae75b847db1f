"""A family's decoder, prepared for packed documents. Training, its checks, calibration and streamed
evaluation all run decoder layers by it.

Positions or bounds separate documents for attention (`inputs`). Rotary frequencies follow each
document's length (`RotaryByDocument`). Recurrent layers take documents one by one: a module with a
convolution over tokens gets a subclass of its class whose forward calls the family's code with one
document a row (`documents`), after `fuse_layers`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.checkpoints.files.attention_needs import attention_needs
from workflow.lib.kernels.attention.attention_choice import FLEX, VARLEN, WIDEST_HEAD
from workflow.lib.kernels.attention.flex import flex_arguments
from workflow.lib.kernels.attention.flex_masks import MaskKind
from workflow.lib.kernels.attention.head_exchange import RowCut
from workflow.lib.kernels.attention.kept_results import KeptResults
from workflow.lib.kernels.attention.packed import FLATTENED, document_bounds, flash_arguments
from workflow.lib.kernels.attention.shared_prompts import SharedPrompts, prompt_mask
from workflow.lib.model.documents import Documents, documents_of
from workflow.lib.model.layers.adapter_dropout import AdapterState
from workflow.lib.model.layers.rotary_by_document import RotaryByDocument, rotate_by_document_
from workflow.lib.system.errors import UserError

SHARING = (VARLEN, "sdpa", "eager")  # attention with which documents can share a prompt

# Arguments with the bounds of documents, for attention on packed rows.
PACKED_ARGUMENTS = {*flash_arguments(torch.empty(0), 0), *flex_arguments(torch.zeros(1, 1))}


class OneByOne:
    """Mixin for a recurrent layer's class; `documents` is set before each forward."""

    documents: Documents | None = None
    adapters = AdapterState()

    def forward(self, hidden_states: torch.Tensor, *args: Any, **others: Any) -> Any:
        """Call the family's forward with documents as rows; return its result in packed rows."""
        family: Callable[..., Any] = super().forward  # type: ignore[misc]
        documents = self.documents
        rows = hidden_states.shape[:2]
        named = {name: x for name, x in others.items() if name not in PACKED_ARGUMENTS}
        if documents is None or documents.are_rows(rows):
            return family(hidden_states, *args, **named)
        divide = partial(_divided, documents, type(self).__name__, rows[1])
        inputs, starts = documents.apart(hidden_states), documents.starts(hidden_states.device)
        outputs = []
        for n, x in enumerate(inputs):
            document_args = [divide(y, n) for y in args]
            document_kwargs = {name: divide(y, n) for name, y in named.items()}
            with self.adapters.rows_as(starts[n], tokens=sum(documents.lengths)):
                outputs.append(family(x, *document_args, **document_kwargs))
        return _joined(documents, outputs, inputs, rows)


def _joined(
    documents: Documents, outputs: Sequence[Any], inputs: Sequence[torch.Tensor], rows: torch.Size
) -> Any:
    """Join a layer's outputs by group to packed rows; of caches and the like keep the first."""
    if isinstance(outputs[0], tuple):
        parts = zip(*outputs, strict=True)
        return tuple(_joined(documents, part, inputs, rows) for part in parts)
    tokens = [x.shape[:2] for x in inputs]
    if [x.shape[:2] for x in outputs if isinstance(x, torch.Tensor)] == tokens:
        return documents.together(outputs, rows)
    return outputs[0]


def _divided(documents: Documents, layer: str, tokens: int, value: Any, number: int) -> Any:
    """Return an argument for packed rows of these tokens as that of group `number`."""
    if isinstance(value, tuple):
        return tuple(_divided(documents, layer, tokens, part, number) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() < 2 or value.shape[1] != tokens:
        raise UserError(
            f"{layer} keeps a state along the row and is given a tensor of shape "
            f"{tuple(value.shape)}, which cannot be divided among the documents of a packed row. "
            "Set data.packing to false: each row is one document then."
        )
    return documents.apart(value)[number]


def separate_documents_(model: PreTrainedModel, adapters: AdapterState) -> list[Any]:
    """Make recurrent layers take documents one by one; return them. adapters: in them."""
    layers = [
        module
        for layer in decoder_layers(model)
        for module in layer.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    ]
    for layer in layers:
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (OneByOne, kind), {"adapters": adapters})
    return layers


class PreparedDecoder:
    """The decoder of a causal LM, changed in place once its layers are final."""

    def __init__(self, causal_lm: PreTrainedModel, adapters: AdapterState) -> None:
        """adapters: the shared state of the model's adapters."""
        rotate_by_document_(causal_lm)
        self._causal_lm = causal_lm
        self._recurrent = separate_documents_(causal_lm, adapters)
        self.in_head_groups = False
        """Whether the backward of `varlen` attention takes some heads at a time."""
        self.kept: KeptResults | None = None
        """Results of `varlen` attention in recomputed layers; None: they compute them again."""

    @property
    def recurrent_layers(self) -> int:
        """Number of layers that take packed documents one by one."""
        return len(self._recurrent)

    def inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        bounds: tuple[torch.Tensor, int] | None = None,
        documents: Documents | None = None,
        shared: SharedPrompts | None = None,
        cut: RowCut | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of the next call of decoder or causal LM, for ids and positions
        (rows, seq_len) int64, 0 at documents' starts; recurrent layers get the documents. bounds,
        documents, shared, cut: as in `MicroBatch`; None: computed, for which the host waits."""
        if self._recurrent:
            documents = documents or documents_in(position_ids)
            for layer in self._recurrent:  # of this forward and its backward
                layer.documents = documents
        inputs = decoder_inputs(self.attention, input_ids, position_ids, bounds, cut)
        if shared is not None:
            inputs |= self._shared_arguments(shared, position_ids)
        if self.in_head_groups and self.attention == VARLEN:
            inputs |= {"in_head_groups": True}
        if self.kept is not None and self.attention == VARLEN:
            inputs |= {"kept": self.kept}
        return inputs | {"position_ids": self._by_axis(inputs["position_ids"])}

    def sharing_obstacle(self) -> str | None:
        """Return why documents cannot share a prompt here; None if they can."""
        needs = attention_needs(self._causal_lm.get_decoder().config.to_dict())
        obstacles = {
            f"attention is {self.attention}": self.attention not in SHARING,
            "attention heads are wide": self.attention == VARLEN and needs.head_dim > WIDEST_HEAD,
            "the family makes its masks itself": needs.masks_of_rows or needs.eager_alone,
            **self._obstacles_of_slices(),
        }
        return next((words for words, holds in obstacles.items() if holds), None)

    def row_obstacle(self) -> str | None:
        """Return why processes cannot share rows; None if they can."""
        exchanges = self.attention in (VARLEN, FLEX)
        obstacles = {f"attention is {self.attention}": not exchanges} | self._obstacles_of_slices()
        return next((words for words, holds in obstacles.items() if holds), None)

    def _obstacles_of_slices(self) -> dict[str, bool]:
        """Return what needs whole documents beside attention, and whether the model has it."""
        return {
            "recurrent layers take documents one by one": bool(self._recurrent),
            "rotary frequencies depend on the lengths of documents": any(
                isinstance(module, RotaryByDocument) for module in self._causal_lm.modules()
            ),
        }

    def _shared_arguments(
        self, shared: SharedPrompts, position_ids: torch.Tensor
    ) -> dict[str, Any]:
        """Return the arguments for shared keys: gathered keys, or masks by kind of layer."""
        if self.attention == VARLEN:
            return {"shared_prompts": shared}
        config: Any = self._causal_lm.get_decoder().config
        window = getattr(config, "sliding_window", None)
        kinds = {
            "full_attention": MaskKind(),
            "sliding_attention": MaskKind(window=window),
            "chunked_attention": MaskKind(chunk=getattr(config, "attention_chunk_size", None)),
        }
        own = set(getattr(config, "layer_types", None) or ())
        masks = {
            name: self._mask(prompt_mask(position_ids, kind))
            for name, kind in kinds.items()
            if name in (own or {"full_attention" if window is None else "sliding_attention"})
        }
        return {"attention_mask": masks if len(masks) > 1 else next(iter(masks.values()))}

    def _mask(self, seen: torch.Tensor) -> torch.Tensor:
        """Return a mask in the form of the attention."""
        if self.attention == "sdpa":
            return seen
        dtype = self._causal_lm.dtype
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=seen.device)
        return torch.where(seen, hidden.new_zeros(()), hidden)

    def _by_axis(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return positions (rows, seq_len) for several rotary axes (M-RoPE, arXiv 2409.12191): (1 +
        axes, rows, seq_len), all alike. With Transformers' own axes, masks of some families ignore
        documents (Qwen2.5-VL)."""
        rope: Any = getattr(self._causal_lm.get_decoder().config, "rope_parameters", None) or {}
        masked = self.attention not in (FLEX, *FLATTENED)
        axes = len(rope.get("mrope_section") or ()) if masked else 0
        return position_ids.expand(1 + axes, -1, -1) if axes else position_ids

    @property
    def attention(self) -> str:
        """The attention implementation of the layers."""
        name: str = self._causal_lm.get_decoder().config._attn_implementation
        return name


def documents_in(position_ids: torch.Tensor) -> Documents:
    """Return the documents of rows (rows, seq_len) on their device; the host waits for it."""
    bounds, _ = document_bounds(position_ids)
    return documents_of(bounds.diff().tolist()).each(lambda x: x.to(position_ids.device))


def decoder_inputs(
    attention: str,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    bounds: tuple[torch.Tensor, int] | None,
    cut: RowCut | None = None,
) -> dict[str, Any]:
    """Return the decoder's arguments. No mask: one of ones would switch off document bounds."""
    documents: dict[str, Any] = {}
    if attention == FLEX:
        whole = position_ids if cut is None else cut.position_ids
        documents = flex_arguments(whole, longest=bounds[1] if bounds else None)
    if attention in FLATTENED:
        documents = flash_arguments(*(bounds or document_bounds(position_ids)))
        input_ids, position_ids = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
    if cut is not None:
        documents["row_cut"] = cut
    return {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False} | documents
