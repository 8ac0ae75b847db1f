"""Scores by a whole or sharded stock model, called with packed rows as in training."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from workflow.lib.distributed.work_sharing import is_sharded, shared_out
from workflow.lib.distributed.world import World
from workflow.lib.kernels.attention.packed import FLATTENED
from workflow.lib.model.layers.adapter_state import AdapterState
from workflow.lib.model.prepared_decoder import PreparedDecoder
from workflow.lib.scores.scoring import Row, scores_of
from workflow.lib.scores.store import Scores

# Logits of one forward at most. A row with more goes through the model again for the others.
LOGITS_BYTES = 2**32


# Tokens of one forward of several rows: weights of 4 bits are decoded once for all of them.
STACKED_TOKENS = 4096


@dataclass(frozen=True)
class _Pass:
    """A forward of some rows, for some of their trained tokens."""

    rows: Sequence[Row]
    trained: Sequence[torch.Tensor]  # of each row, as in `Row`


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
        passes = [*self._passes(rows)]
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

    def _passes(self, rows: Sequence[Row]) -> Iterator[_Pass]:
        """Yield the forwards of rows: several together, a row with many trained tokens again."""
        alone = self.attention in FLATTENED  # where rows are long already
        stack: list[Row] = []
        for row in rows:
            size = (1 + len(stack)) * max(x.input_ids.shape[1] for x in [*stack, row])
            if stack and (alone or size > min(self._most, STACKED_TOKENS)):
                yield from self._of_stack(stack)
                stack = []
            stack.append(row)
        yield from self._of_stack(stack)

    def _of_stack(self, stack: list[Row]) -> Iterator[_Pass]:
        if len(stack) > 1:
            yield _Pass(stack, [row.trained for row in stack])
        else:
            yield from (_Pass([x], [some]) for x in stack for some in x.trained.split(self._most))

    # FSDP gathers into the same buffers in every mode, and inference mode would mark them
    @torch.no_grad()
    def _forward(self, one: _Pass) -> Scores:
        ids, positions = (x.to(self._device) for x in _stacked(one.rows))
        every = [trained.to(self._device) for trained in one.trained]
        columns = torch.cat(every).sub(1).unique()
        inputs = self._prepared.inputs(ids, positions)
        logits = self._model(**inputs, logits_to_keep=columns).logits
        assert logits.shape[1] == len(columns), "the model ignores logits_to_keep"
        places = [torch.searchsorted(columns, trained - 1) for trained in every]
        wanted = torch.cat([logits[row, place] for row, place in enumerate(places)])
        targets = torch.cat([ids[row, trained] for row, trained in enumerate(every)])
        return scores_of(wanted, targets, top_k=self._top_k, vocabulary=self._vocabulary)


def _stacked(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and positions (rows, longest) int64; what pads a row is one more document."""
    longest = max(row.input_ids.shape[1] for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        length = row.input_ids.shape[1]
        ids[number, :length] = row.input_ids[0]
        positions[number, :length] = row.position_ids[0]
        positions[number, length:] = torch.arange(longest - length)
    return ids, positions
