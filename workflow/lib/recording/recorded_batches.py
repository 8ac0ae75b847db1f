"""The micro-batches of a plan as the trainer takes them, without values: all rows are full, their
documents equal, every token is trained."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from workflow.lib.data.tokens.token_store import OPTIONAL
from workflow.lib.distributed.world import World
from workflow.lib.kernels.attention.row_cut import RowCut
from workflow.lib.kernels.attention.shared_prompts import SharedPrompts
from workflow.lib.model.documents import documents_of
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.planning.memory.allocation_tape import STEPS
from workflow.lib.recording.layer_tape import FIRST_PHASE, LayerTape
from workflow.lib.settings.objectives import NEEDS, PAIRED
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.training.batches import RowGroup
from workflow.lib.training.step_batches import StepRows

STEP_SIZES = (1.0, 1.0, 1.0)  # as many as an objective has


class RecordedBatches:
    """`step_batches.StepBatches` of a plan. Work is counted of the last step's last micro-batch."""

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
                self._tape.counts = step == STEPS - 1 and number == count - 1
                self._tape.works_for = FIRST_PHASE  # before its begin: inputs are copied
                batch = self._with_rows(self.batch(self._plan.micro_batch_size))
                yield batch if self._plan.graphed else batch.to(self._device)

    def again(self, rows: StepRows) -> Iterator[MicroBatch]:
        for group in rows.groups:
            yield self.batch(len(group.indices)).to(self._device)

    def check_batch(self) -> MicroBatch:
        """Return the row of the start-up checks, on the device."""
        return self._with_rows(self.batch(1)).to(self._device)

    def _with_rows(self, batch: MicroBatch) -> MicroBatch:
        if self._rows_of is None:
            return batch
        return replace(batch, embedded=self._rows_of(batch.input_ids.flatten()))

    def batch(self, rows: int) -> MicroBatch:
        """Return a micro-batch of so many rows in host memory, with its objective's inputs."""
        documents = self._documents(rows)
        ids = torch.zeros(rows, self._plan.slice_tokens, dtype=torch.int64)
        batch = MicroBatch(
            input_ids=ids,
            position_ids=torch.zeros_like(ids),
            positions=torch.zeros_like(ids.flatten()),
            targets=torch.zeros_like(ids.flatten()),
            bounds=(torch.tensor([0, *documents]).cumsum(0).to(torch.int32), max(documents)),
            row_keys=torch.zeros(rows, dtype=torch.int64),
            documents=documents_of(documents),
            lengths=torch.zeros(rows, dtype=torch.int64),
        )
        return self._with_objective_inputs(replace(batch, cut=self._cut(batch)))

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

    def _documents(self, rows: int) -> list[int]:
        """Return the lengths of the documents of so many rows, in tokens."""
        plan, tokens = self._plan, self._whole_tokens
        count = min(math.ceil(rows * plan.documents_per_row), rows * tokens)
        counts = [count // rows + (row < count % rows) for row in range(rows)]
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
        if self._training.shares_prompts:
            batch = replace(batch, shared=_shared(batch, graphed=plan.graphed))
        counts = {"token": tokens, "example": len(firsts)}
        required = {
            name: torch.from_numpy(np.zeros(counts[array.per], dtype=array.dtype))
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


def _shared(batch: MicroBatch, *, graphed: bool) -> SharedPrompts:
    """Return keys for as many tokens as rows can have: at least as many as in any micro-batch.
    graphed: one more, for which a graph's layout has as many as any micro-batch can need there."""
    tokens = torch.arange(batch.input_ids.numel())
    keys = torch.arange(len(tokens) + graphed)
    return SharedPrompts(keys, tokens, tokens[None], *batch.bounds)
