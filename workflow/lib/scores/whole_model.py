"""Scores by a whole or sharded stock model, called with packed rows as in training."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from workflow.lib.distributed.work_sharing import is_sharded, shared_out
from workflow.lib.distributed.world import World
from workflow.lib.model.layers.adapter_state import AdapterState
from workflow.lib.model.prepared_decoder import PreparedDecoder
from workflow.lib.scores.scoring import Row, scores_of
from workflow.lib.scores.store import Scores

# Logits of one forward at most. A row with more goes through the model again for the others.
LOGITS_BYTES = 2**32


@dataclass(frozen=True)
class _Pass:
    """A forward of a row, for some of its trained tokens."""

    row: Row
    trained: torch.Tensor


class WholeModel:
    """A causal LM in evaluation mode, prepared for packed rows, on this process or over `world`,
    whose processes each take their share of the rows."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        top_k: int,
        vocabulary: int,
        world: World | None = None,
    ) -> None:
        """model: changed in place; top_k, vocabulary: as in `scores_of`."""
        self._model: Any = model
        self._prepared = PreparedDecoder(model, AdapterState())
        self._device, self._world = device, world
        self._top_k, self._vocabulary = top_k, vocabulary
        row_bytes = int(model.config.get_text_config().vocab_size) * 4
        self._most = max(1, LOGITS_BYTES // row_bytes)
        self.attention = self._prepared.attention

    def scores(self, rows: Sequence[Row], worked: Callable[[float], None]) -> Scores:
        passes = [_Pass(row, some) for row in rows for some in row.trained.split(self._most)]
        own = math.ceil(len(passes) / (1 if self._world is None else self._world.size))

        def compute(mine: list[_Pass]) -> list[Scores]:
            # every forward of a sharded model is collective: all make equally many
            idle = passes[:1] * (own - len(mine)) if is_sharded(self._model) else []
            found = []
            for one in [*mine, *idle]:
                found.append(self._forward(one))
                worked(1 / own)
            return found[: len(mine)]

        return Scores.joined(shared_out(passes, compute, world=self._world))

    # FSDP gathers into the same buffers in every mode, and inference mode would mark them
    @torch.no_grad()
    def _forward(self, one: _Pass) -> Scores:
        ids, trained = one.row.input_ids.to(self._device), one.trained.to(self._device)
        inputs = self._prepared.inputs(ids, one.row.position_ids.to(self._device))
        logits = self._model(**inputs, logits_to_keep=trained - 1).logits[0]
        assert len(logits) == len(trained), "the model ignores logits_to_keep"
        return scores_of(logits, ids[0, trained], top_k=self._top_k, vocabulary=self._vocabulary)
