"""Generation where a token of all rows is one CUDA graph.

Python takes longer to launch the operations of a token than a GPU to compute them. Keys and values
in a cache of fixed size have fixed addresses, so a graph can repeat the launches. Rows that have
ended go on until all have, and the caller cuts off what they add."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import StaticLayer

from workflow.lib.distributed.work_sharing import is_sharded
from workflow.lib.model.layers.rotary_by_length import changes_with_length
from workflow.lib.training.cuda_capture import Capture, CudaCapture, first_cause

logger = logging.getLogger("workflow")

Model = PeftModel | PreTrainedModel
Pick = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the next tokens (rows, 1) from logits (rows, vocabulary) and the answers' length (1,)."""
Ended = Callable[[Sequence[int]], bool]
"""Whether the last token of an answer ends it."""

LOOKED = 16  # tokens between two looks at whether all rows have ended
ALIGNED = 64  # tokens of a cache, which attention's kernels read in blocks
ATTENTION = {"full_attention", "sliding_attention"}  # kinds of layers with keys and values alone


def takes_steps(model: Model, device: torch.device) -> bool:
    """Return whether a token of this model can be a CUDA graph: its cache may have a fixed size,
    and nothing depends on values."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    config = base.config.get_text_config(decoder=True)
    return bool(
        device.type == "cuda"
        and not is_sharded(model)
        and base._can_compile_fullgraph
        and base.config._attn_implementation == "sdpa"
        and len(set(getattr(base, "hf_device_map", {}).values())) <= 1
        and ATTENTION.issuperset(getattr(config, "layer_types", None) or ())
        and not changes_with_length(config)
    )


@torch.no_grad()
def continue_by_steps(
    model: Model,
    ids: torch.Tensor,
    mask: torch.Tensor,
    *,
    pick: Pick,
    ended: Ended,
    max_new_tokens: int,
    capture: Capture | None = None,
) -> list[list[int]]:
    """Return the new tokens of each row, with those after an end. ids, mask: (rows, tokens), padded
    at the left; capture: None: into a CUDA graph."""
    steps = _Steps(model, ids, mask, pick, max_new_tokens)
    steps.prefill(ids)
    launch: Callable[[], object] = steps.token
    done = [False] * len(ids)
    for number in range(1, max_new_tokens):
        if number % LOOKED == 0:
            rows = steps.tokens[:, :number].tolist()
            looked = range(number - LOOKED + 1, number + 1)
            done = [
                end or any(ended(row[:n]) for n in looked)
                for row, end in zip(rows, done, strict=True)
            ]
            if all(done):
                return rows
        if number == 2:  # the first one compiles and chooses kernels
            launch = _captured(steps.token, capture or CudaCapture())
        launch()
    return steps.tokens.tolist()


def _captured(step: Callable[[], torch.Tensor], capture: Capture) -> Callable[[], object]:
    """Return the replay of a step, or the step itself where it cannot be captured. Raises
    `torch.OutOfMemoryError`, for which the caller takes fewer rows."""
    try:
        return capture(step)
    except RuntimeError as error:
        cause = first_cause(error)
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        reason = str(cause).splitlines()[0]
        logger.warning("a token cannot be a CUDA graph, so it takes longer: %s", reason)
        return step


class _Steps:
    """The tensors that a token's graph reads and writes."""

    def __init__(
        self, model: Model, ids: torch.Tensor, mask: torch.Tensor, pick: Pick, max_new_tokens: int
    ) -> None:
        rows, length = ids.shape
        size = -(-(length + max_new_tokens) // ALIGNED) * ALIGNED
        self._model, self._pick = model, pick
        config: Any = model.config
        # Windows have all keys, too, and a mask: Transformers' cache of a window (5.23) goes
        # another way once it is full.
        layers = config.get_text_config(decoder=True).num_hidden_layers
        self._cache = Cache(layers=[StaticLayer(max_cache_len=size) for _ in range(layers)])
        self._seen = nn.functional.pad(mask, (0, size - length), value=1)
        self._positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        self._position = self._positions[:, -1:].clone()
        self._token = ids[:, -1:].clone()
        self._count = ids.new_zeros(1)
        self.tokens = ids.new_zeros(rows, max_new_tokens)

    def prefill(self, ids: torch.Tensor) -> None:
        """Read the prompts, and pick each row's first token."""
        self._take(ids, self._positions)

    def token(self) -> torch.Tensor:
        """Pick one more token of each row (rows, 1)."""
        return self._take(self._token, self._position)

    def _take(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = self._model(
            input_ids=ids,
            attention_mask=self._seen,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self._token.copy_(self._pick(logits, self._count))
        self.tokens.index_copy_(1, self._count, self._token)
        self._count.add_(1)
        self._position.add_(1)
        return self._token
