"""The micro-batches of a plan as the trainer takes them, without values: all rows are full of
trained tokens, and their documents equal. Of pairs and groups the largest rows decide the memory
and, in a step more, the mean ones the work."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from workflow.lib.data.tokens.token_store import OPTIONAL
from workflow.lib.distributed.world import World
from workflow.lib.kernels.attention.answer_rows import (
    AnswerRows,
    LengthGroup,
    RowCounts,
    equal_lengths,
)
from workflow.lib.kernels.attention.head_exchange import RowCut
from workflow.lib.kernels.attention.shared_prompts import SharedPrompts
from workflow.lib.model.documents import documents_of
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.planning.memory.allocation_tape import STEPS
from workflow.lib.recording.layer_tape import FIRST_PHASE, LayerTape
from workflow.lib.settings.objectives import NEEDS, PAIRED
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.training.batches import RowGroup, StepRows
from workflow.lib.training.micro_batch_graphs import padding_units

STEP_SIZES = (1.0, 1.0, 1.0)  # as many as an objective has


class RecordedBatches:
    """`batches.StepBatches` of a plan. Work is counted of the last step's last micro-batch."""

    def __init__(
        self,
        training: CausalLMForTraining,
        plan: StepPlan,
        tape: LayerTape,
        world: World,
        rows_of: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        """rows_of: embedding rows (n, hidden) of ids (n,), if they come from host memory."""
        self._training, self._plan, self._tape, self._rows_of = training, plan, tape, rows_of
        self._device, self._context = world.device, world.context
        self._chunk_rows = training.head_loss.chunk_rows()
        self._shares, self.num_steps = training.shares_prompts, STEPS
        documents = plan.documents_per_row
        self._whole = RowCounts(self._whole_tokens, documents, 0, self._whole_tokens)
        # A graph's layout has room for more keys than tokens, if any micro-batch has one more.
        self._largest = self._whole._replace(prompt_keys=int(self._shares and plan.graphed))
        self._mean = self._largest
        if rows := plan.answer_rows:
            self._largest = self._laid_out(rows.largest)
            self._mean = self._mean_row(rows)
            self.num_steps += 1

    def _laid_out(self, row: RowCounts) -> RowCounts:
        """Return a row, or a whole one if documents have their own prompts."""
        if self._shares:
            return row
        return row._replace(tokens=self._whole_tokens, prompt_keys=0)

    def _mean_row(self, rows: AnswerRows) -> RowCounts:
        """Return the mean row of random micro-batches, with the padding of graphs."""
        plan = self._plan
        size = plan.micro_batch_size
        shown = replace(rows, rows=tuple(map(self._laid_out, rows.rows)))
        each = shown.micro_batches(processes=plan.row_groups, rows=size)
        tokens = each[..., 0].max(axis=(1, 2))
        documents, keys, trained = each[..., 1:].sum(axis=2).max(axis=1).T
        if plan.graphed:
            units = [padding_units(int(n * size), self._chunk_rows) for n in tokens]
            keys, trained = (
                -(-counts // unit) * unit
                for counts, unit in zip((keys, trained), np.array(units).T, strict=True)
            )
        return RowCounts(tokens.mean(), *(x.mean() / size for x in (documents, keys, trained)))

    @property
    def document_lengths(self) -> tuple[LengthGroup, ...]:
        """Of the rows of all steps, for the work of attention."""
        plan = self._plan
        if plan.answer_rows and self._shares:
            return plan.answer_rows.documents
        return plan.document_lengths or equal_lengths(plan.seq_len / plan.documents_per_row)

    @property
    def seq_len(self) -> int:
        return self._plan.seq_len

    def rows(self, step: int) -> StepRows:
        plan = self._plan
        # Graphs run their work once before the capture. Passes without one come after it too.
        captured = plan.graphed and (plan.accumulates or plan.forward_passes > 1)
        count = 1 + (plan.accumulates if step else captured)
        rows = np.arange(plan.micro_batch_size)
        groups = [RowGroup(rows, [0] * len(rows))] * count
        return StepRows(step, np.tile(rows, count), groups, plan.tokens * count, STEP_SIZES)

    def text_tokens(self, rows: StepRows) -> int:
        return rows.trained_tokens

    def ahead(self, steps: range) -> Iterator[MicroBatch]:
        for step in steps:
            count = len(self.rows(step).groups)
            for number in range(count):
                self._tape.counts = step == self.num_steps - 1 and number == count - 1
                self._tape.averages = step >= STEPS
                self._tape.works_for = FIRST_PHASE  # before its begin: inputs are copied
                batch = self._with_rows(self._batch_of(step))
                yield batch if self._plan.graphed else batch.to(self._device)

    def again(self, rows: StepRows) -> Iterator[MicroBatch]:
        for _ in rows.groups:
            yield self._batch_of(rows.step).to(self._device)

    def check_batch(self) -> MicroBatch:
        """Return the row of the start-up checks, on the device."""
        return self._with_rows(self.batch(1, self._whole)).to(self._device)

    def _batch_of(self, step: int) -> MicroBatch:
        row = self._largest if step < STEPS else self._mean
        batch = self.batch(self._plan.micro_batch_size, row)
        return replace(batch, shared=self._shared(batch, row)) if self._shares else batch

    def _with_rows(self, batch: MicroBatch) -> MicroBatch:
        if self._rows_of is None:
            return batch
        return replace(batch, embedded=self._rows_of(batch.input_ids.flatten()))

    def batch(self, rows: int, row: RowCounts) -> MicroBatch:
        """Return a micro-batch of such rows in host memory, with its objective's inputs."""
        documents = self._documents(rows, row)
        sharers = self._plan.context_parallel
        ids = torch.zeros(rows, -(-round(row.tokens) // sharers), dtype=torch.int64)
        trained = torch.zeros(max(1, round(rows * row.trained / sharers)), dtype=torch.int64)
        batch = MicroBatch(
            input_ids=ids,
            position_ids=torch.zeros_like(ids),
            positions=trained,
            targets=torch.zeros_like(trained),
            bounds=(torch.tensor([0, *documents]).cumsum(0).to(torch.int32), max(documents)),
            row_keys=torch.zeros(rows, dtype=torch.int64),
            documents=documents_of(documents),
            lengths=torch.zeros(rows, dtype=torch.int64),
        )
        return self._with_objective_inputs(replace(batch, cut=self._cut(batch)))

    def _shared(self, batch: MicroBatch, row: RowCounts) -> SharedPrompts:
        tokens, rows = torch.arange(batch.input_ids.numel()), self._plan.answer_rows
        keys = torch.arange(len(tokens) + round(len(batch.input_ids) * row.prompt_keys))
        copies = tokens.repeat(rows.copies if rows else 1, 1)
        return SharedPrompts(keys, tokens, copies, *batch.bounds)

    def _cut(self, batch: MicroBatch) -> RowCut | None:
        """Return the whole rows of a micro-batch, if processes share them."""
        if self._context is None:
            return None
        whole = batch.input_ids.new_zeros(len(batch.input_ids), self._whole_tokens)
        return RowCut(self._context, whole, batch.positions)

    @property
    def _whole_tokens(self) -> int:
        """Tokens of a row over all processes that share it."""
        return self._plan.slice_tokens * self._plan.context_parallel

    def _documents(self, rows: int, row: RowCounts) -> list[int]:
        """Return the lengths of the documents of so many rows, in tokens."""
        tokens = round(row.tokens)
        count = min(math.ceil(rows * row.documents), rows * tokens)
        counts = [count // rows + (number < count % rows) for number in range(rows)]
        return [
            tokens // row_count + (number < tokens % row_count)
            for row_count in counts
            for number in range(row_count)
        ]

    def _with_objective_inputs(self, batch: MicroBatch) -> MicroBatch:
        plan, needs, tokens = self._plan, NEEDS[self._plan.objective], len(batch.positions)
        firsts = torch.arange(0, len(batch.bounds[0]) - 2, 2)
        if needs.examples in PAIRED:
            batch = replace(batch, firsts=firsts, step_sizes=torch.ones(len(STEP_SIZES)))
        counts = {"token": tokens, "example": len(firsts)}
        required = {
            name: _zeros(counts[array.per], dtype=array.dtype)
            for name, array in OPTIONAL.items()
            if array.required and array.examples == needs.examples
        }
        batch = replace(batch, **required)  # type: ignore[arg-type]
        if plan.top_k:
            ids = torch.zeros(tokens, plan.top_k, dtype=torch.int64)
            log_probs = torch.zeros(tokens, plan.top_k + 1)
            return replace(batch, teacher_ids=ids, teacher_log_probs=log_probs)
        if needs.scores_of is not None and not plan.start_reference:
            return replace(batch, reference=torch.zeros(tokens))
        return batch


def _zeros(count: int, *, dtype: npt.DTypeLike) -> torch.Tensor:
    """Return zeros (count,) of a dtype of numpy. Of one element from numpy itself, fake tensors
    would keep the value, and compute with it outside of the recorder (torch 2.11)."""
    return torch.zeros(count, dtype=torch.from_numpy(np.zeros(0, dtype=dtype)).dtype)
