"""Held-out loss while a run trains, and the adapter that had the lowest.

Documents are packed into rows as in training and go through the training model itself, sharded as
it is. Every improvement is kept beside the checkpoints, in a folder `best-<8 digits>`, until no
checkpoint from before it is left: a run that is resumed from any of them finds the best adapter
that it had then.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from workflow.lib.data.tokens.token_store import Document, TokenStore, choose_documents
from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.distributed.world import World
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.system.errors import UserError
from workflow.lib.training.batches import make_batch
from workflow.lib.training.checkpoint import discard, load_adapter_, save_adapter, saved_steps


def heldout_rows(documents: Sequence[Document], *, seq_len: int) -> list[list[Document]]:
    """Return the documents in rows of at most `seq_len` tokens, in their order."""
    rows: list[list[Document]] = []
    free = 0
    for document in documents:
        length = len(document[0])
        if length > free:
            rows.append([])
            free = seq_len
        rows[-1].append(document)
        free -= length
    return rows


class HeldOut:
    """The held-out documents of a run, or `at_most` of them drawn by `seed`, ready to be measured
    on. Raises `UserError` if there is none with a trained token."""

    def __init__(
        self,
        store: TokenStore,
        *,
        every: int,
        num_steps: int,
        at_most: int | None,
        seed: int,
        micro_batch_size: int,
    ) -> None:
        self._every, self._num_steps = every, num_steps
        documents = store.heldout_documents()
        numbers = choose_documents(documents, at_most=at_most, seed=seed)
        if not numbers:
            raise UserError(
                "train.evaluate_every_steps asks for the held-out loss, and no held-out document "
                "has a trained token. "
                "Set it to null, or give held-out data (data.heldout, data.heldout_share)."
            )
        chosen = [documents[number] for number in numbers]
        self._seq_len = max(store.seq_len, *(len(ids) for ids, _ in chosen))
        self._micro_batch_size = micro_batch_size
        self._rows = heldout_rows(chosen, seq_len=self._seq_len)

    def due(self, step: int) -> bool:
        """Tell whether the loss is to be measured after `step` (1-based): every so many steps, and
        after the last."""
        return step % self._every == 0 or step == self._num_steps

    def loss(
        self,
        training: CausalLMForTraining,
        *,
        world: World,
        moved: Callable[[], None] = lambda: None,
    ) -> float:
        """Return the mean -log p (nats) of a trained token of the documents; equal on all
        processes. Collective. Calls `moved` after every batch."""
        was_training = training.training
        training.eval()
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        with forward_only(training):
            for batch in self._batches(world):
                total[0] += training(batch)
                total[1] += training.objective.size(batch)
                moved()
        training.train(was_training)
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def _batches(self, world: World) -> Iterator[MicroBatch]:
        """Yield this process's rows. All processes have as many batches, because each gathers the
        weights."""
        own_rows = self._rows[world.rank :: world.size]
        num_rows = math.ceil(len(self._rows) / world.size)  # of the process that has most
        for start in range(0, num_rows, self._micro_batch_size):
            count = min(self._micro_batch_size, num_rows - start)
            rows = own_rows[start : start + count]
            yield self._batch([*rows, *([] for _ in range(count - len(rows)))], world.device)

    def _batch(self, rows: Sequence[Sequence[Document]], device: torch.device) -> MicroBatch:
        """Pad rows at the end; the padding is one more document without a trained token."""
        shape = (len(rows), self._seq_len)
        ids, position_ids = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.bool_)
        for number, documents in enumerate(rows):
            start = 0
            for document_ids, document_mask in documents:
                span = slice(start, start + len(document_ids))
                ids[number, span], mask[number, span] = document_ids, document_mask
                position_ids[number, span] = np.arange(len(document_ids))
                start = span.stop
            position_ids[number, start:] = np.arange(self._seq_len - start)
        return make_batch(ids, position_ids, mask, device=device)


class BestAdapter:
    """Keeps the adapter with the lowest held-out loss in the checkpoints' folder. All processes
    call all methods. rows: the metrics of the run up to the step that it continues from. Adapters
    that a killed process kept after that step are removed. Raises `UserError` if the adapter that
    the rows call the best is no longer there."""

    def __init__(self, folder: Path, rows: Sequence[dict[str, Any]], *, world: World) -> None:
        self._folder, self._world = folder, world
        self.loss, self.step = math.inf, 0  # of the best adapter so far; step 0: none
        self._steps: list[int] = []  # after which the loss was the lowest so far
        for row in rows:
            if row.get("heldout_loss", math.inf) < self.loss:
                self._improve(loss=row["heldout_loss"], step=row["step"])
        if self.step and not best_dir(folder, self.step).is_dir():
            raise UserError(
                f"the adapter of step {self.step}, which had the lowest held-out loss, is not in "
                f"{folder}. "
                "Set train.select to last, or move the folder away to train anew."
            )
        if world.is_main:
            self._prune()

    def _improve(self, *, loss: float, step: int) -> None:
        self.loss, self.step = loss, step
        self._steps.append(step)

    def offer(self, training: nn.Module, *, loss: float, step: int) -> None:
        """Keep the adapter after `step` if its loss is the lowest so far. Collective."""
        if not loss < self.loss:
            return
        self._improve(loss=loss, step=step)
        partial = self._folder / f".best-{step:08d}.partial"
        if self._world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier(self._world.io_group)  # all write into the folder
        save_adapter(training, partial, world=self._world)
        if self._world.is_main:
            shutil.rmtree(best_dir(self._folder, step), ignore_errors=True)
            partial.rename(best_dir(self._folder, step))
            self._prune()
        # From here on the others may read it (`load_`).
        dist.barrier(self._world.io_group)

    def load_(self, training: nn.Module) -> None:
        load_adapter_(training, best_dir(self._folder, self.step))

    def _prune(self) -> None:
        """Remove what no resumed run can call its best. That is all before the best adapter at the
        oldest checkpoint, and what this run knows not."""
        oldest = min(saved_steps(self._folder), default=0)
        first = max((step for step in self._steps if step <= oldest), default=0)
        needed = {best_dir(self._folder, step) for step in self._steps if step >= first}
        for path in self._folder.glob(".best-*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        for path in set(self._folder.glob("best-*")) - needed:
            discard(path)


def best_dir(folder: Path, step: int) -> Path:
    """Return the folder of the adapter that was the best when it was saved, after `step` steps."""
    return folder / f"best-{step:08d}"
