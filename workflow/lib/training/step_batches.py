"""The rows of each optimizer step, and this process's micro-batches of them.

Data order is a pure function of (seed, step): every process knows the rows of all, and from them
the divisor of a step's loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from workflow.lib.data.tokens.packing import text_lengths
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.world import World
from workflow.lib.kernels.attention.answer_rows import padded_length
from workflow.lib.model.host_embedding import StoredRows
from workflow.lib.model.layers.adapter_dropout import row_keys
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.settings.config import TrainConfig
from workflow.lib.settings.schedule import step_rows
from workflow.lib.training.batches import (
    RowGroup,
    RowNumbers,
    attention_costs,
    micro_batches,
    process_rows,
    shared_lengths,
)


@dataclass(frozen=True)
class StepRows:
    """The rows of an optimizer step, and this process's micro-batches of them."""

    step: int  # counts from 0
    indices: npt.NDArray[np.int64]  # (global_batch_size,), the same on all processes
    groups: list[RowGroup]  # of this process's micro-batches
    trained_tokens: int  # over all processes
    sizes: tuple[float, ...]  # of `Objective.step_sizes`

    @property
    def divisor(self) -> float:
        """Of the summed loss of all processes; 1 for a step without weight."""
        return self.sizes[0] or 1.0


class StepBatches(Protocol):
    """Rows of steps, and this process's micro-batches."""

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""

    def rows(self, step: int) -> StepRows:
        """Return the rows of a step, equal on all processes but for `groups`."""

    def text_tokens(self, rows: StepRows) -> int:
        """Return the tokens of a step over all processes, without padding."""

    def ahead(self, steps: range) -> Iterator[MicroBatch]:
        """Yield the micro-batches of all steps; the next one is made meanwhile."""

    def again(self, rows: StepRows) -> Iterator[MicroBatch]:
        """Yield the micro-batches of one step on the device, for a further pass."""


@dataclass(frozen=True)
class StoredBatches:
    """Micro-batches of the rows of a tokens folder."""

    training: CausalLMForTraining
    store: TokenStore
    settings: TrainConfig
    micro_batch_size: int
    world: World
    stay_on_host: bool
    """`ahead` leaves micro-batches in page-locked host memory."""
    waited: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]
    """Passes the micro-batches of `ahead` on, and may note the wait for each."""

    @property
    def seq_len(self) -> int:
        return int(self.store.seq_len)

    def ahead(self, steps: range) -> Iterator[MicroBatch]:
        rows_of = self.training.rows_of
        batches = micro_batches(
            self.store,
            chain.from_iterable(self.rows(step).groups for step in steps),
            device=self.world.device,
            look_up=rows_of.on_host if isinstance(rows_of, StoredRows) else None,
            context=self.world.context,
            stay_on_host=self.stay_on_host,
            apart=self.training.recurrent_layers > 0,
        )
        return self.waited(batches)

    def again(self, rows: StepRows) -> Iterator[MicroBatch]:
        world = self.world
        return micro_batches(self.store, rows.groups, device=world.device, context=world.context)

    def text_tokens(self, rows: StepRows) -> int:
        store, indices = self.store, rows.indices
        return int(text_lengths(store.position_ids[indices], store.loss_mask[indices]).sum())

    @cached_property
    def _row_costs(self) -> RowNumbers:
        position_ids = self.store.position_ids
        return RowNumbers(self.store.num_rows, lambda rows: attention_costs(position_ids[rows]))

    @cached_property
    def _shared_lengths(self) -> RowNumbers:
        return RowNumbers(self.store.num_rows, partial(shared_lengths, self.store))

    def rows(self, step: int) -> StepRows:
        indices = step_rows(
            num_rows=self.store.num_rows,
            global_batch_size=self.settings.global_batch_size,
            seed=self.settings.seed,
            step=step,
        )
        costs = self._row_costs.of(indices)
        groups, size = self.world.row_groups, self.micro_batch_size
        by_group = np.stack(
            [process_rows(indices, costs, rank=rank, size=groups) for rank in range(groups)]
        )
        own_indices = by_group[self.world.row_group]
        sizes = self.training.objective.step_sizes(self.store, indices)
        own_groups = [
            RowGroup(
                part := own_indices[start : start + size],
                row_keys(self.settings.seed, step=step, rows=part),
                sizes,
                self._row_tokens(by_group[:, start : start + size]),
            )
            for start in range(0, len(own_indices), size)
        ]
        trained_tokens = int(self.store.trained_tokens_per_row[indices].sum())
        return StepRows(step, indices, own_groups, trained_tokens, sizes)

    def _row_tokens(self, rows: npt.NDArray[np.int64]) -> int | None:
        """Return the tokens of the longest of all processes' rows with shared prompts: processes
        exchange equal numbers."""
        if not self.training.shares_prompts:
            return None
        longest = int(self._shared_lengths.of(rows.flatten()).max())
        return padded_length(longest, seq_len=self.seq_len)
