"""A family's decoder, prepared for packed documents: the one way in which training, the checks
before its first step, calibration and streamed evaluation run decoder layers.

Three things keep the documents of a row apart, and all are settled here: positions or bounds for
attention (`inputs`), rotary frequencies by a document's own length (`RotaryByDocument`), and
recurrent layers that take documents one by one (`document_states`).
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from workflow.lib.kernels.attention.flex import flex_arguments
from workflow.lib.kernels.attention.packed import FLATTENED, document_bounds, flash_arguments
from workflow.lib.model.document_states import separate_documents_, tell_documents_
from workflow.lib.model.documents import Documents, documents_of
from workflow.lib.model.layers.adapter_state import AdapterState
from workflow.lib.model.layers.rotary_by_document import rotate_by_document_
from workflow.lib.system.compute_choice import FLEX


class PreparedDecoder:
    """The decoder of a causal LM, which is changed in place: once, when its layers are those that
    will compute (`fuse_layers` comes before).
    """

    def __init__(self, causal_lm: PreTrainedModel, adapters: AdapterState) -> None:
        """adapters: what the adapters of the model share."""
        rotate_by_document_(causal_lm)
        self._causal_lm = causal_lm
        self._recurrent = separate_documents_(causal_lm, adapters)

    @property
    def recurrent_layers(self) -> int:
        """How many there are, which take packed documents one by one."""
        return len(self._recurrent)

    def inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        bounds: tuple[torch.Tensor, int] | None = None,
        documents: Documents | None = None,
    ) -> dict[str, Any]:
        """Return what decoder or causal LM is called with next for packed rows; recurrent layers
        are told their documents.

        input_ids, position_ids: (rows, seq_len) int64, a position 0 starts a document. bounds,
        documents: as in `MicroBatch`; None: found from the positions, for which the host waits.
        """
        if self._recurrent:
            tell_documents_(self._recurrent, documents or documents_in(position_ids))
        inputs = decoder_inputs(self.attention, input_ids, position_ids, bounds)
        return inputs | {"position_ids": self._by_axis(inputs["position_ids"])}

    def _by_axis(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return positions (rows, seq_len) as a decoder takes them whose rotary embedding has
        several axes (M-RoPE, arXiv 2409.12191): (1 + axes, rows, seq_len), the text's own first.

        Text has the same position on every axis. Transformers makes the axes itself, but then the
        masks of eager and sdpa attention know of no documents in some families (Qwen2.5-VL).
        """
        rope: Any = getattr(self._causal_lm.get_decoder().config, "rope_parameters", None) or {}
        masked = self.attention not in (FLEX, *FLATTENED)
        axes = len(rope.get("mrope_section") or ()) if masked else 0
        return position_ids.expand(1 + axes, -1, -1) if axes else position_ids

    @property
    def attention(self) -> str:
        """The implementation by which the layers attend."""
        name: str = self._causal_lm.get_decoder().config._attn_implementation
        return name


def documents_in(position_ids: torch.Tensor) -> Documents:
    """Return the documents of rows (rows, seq_len) on their device, which the host waits for."""
    bounds, _ = document_bounds(position_ids)
    return documents_of(bounds.diff().tolist()).each(lambda x: x.to(position_ids.device))


def decoder_inputs(
    attention: str,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    bounds: tuple[torch.Tensor, int] | None,
) -> dict[str, Any]:
    """Return what a decoder is called with. No attention mask: one of ones would switch off the
    document boundaries.
    """
    documents: dict[str, Any] = {}
    if attention == FLEX:
        documents = flex_arguments(position_ids)
    if attention in FLATTENED:
        documents = flash_arguments(*(bounds or document_bounds(position_ids)))
        input_ids, position_ids = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
    return {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False} | documents
