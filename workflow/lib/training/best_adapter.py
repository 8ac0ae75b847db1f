"""Held-out loss while a run trains, and the adapter with the lowest.

Documents are packed into rows as in training and go through the training model itself, sharded as
it is, in the compute dtype. The best adapter is kept beside the checkpoints, in a folder
`best-<8 digits>`, for each of them: a run that resumes from any checkpoint finds the best adapter
of that time."""

import math
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from workflow.lib.artifacts.checkpoint_folder import saved_steps
from workflow.lib.data.tokens.token_store import Document, TokenStore, choose_documents
from workflow.lib.distributed.world import World
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.objectives.objective import DocumentSums
from workflow.lib.settings.objectives import PAIRED
from workflow.lib.system.errors import UserError
from workflow.lib.training.batches import cut_rows, make_batch, with_scores
from workflow.lib.training.checkpoint import discard, load_adapter_, save_adapter
from workflow.lib.training.start_reference import token_losses


def heldout_rows(lengths: Sequence[int], *, seq_len: int) -> list[list[int]]:
    """Return the numbers of these lengths in rows of at most `seq_len` tokens, in order."""
    rows: list[list[int]] = []
    free = 0
    for number, length in enumerate(lengths):
        if length > free:
            rows.append([])
            free = seq_len
        rows[-1].append(number)
        free -= length
    return rows


def rows_of_documents(
    documents: Sequence[Document], *, seq_len: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return a row's ids, positions and mask (1, seq_len); its padding is one more document without
    a trained token."""
    ids, mask = np.zeros(seq_len, dtype=np.int64), np.zeros(seq_len, dtype=np.bool_)
    positions, start = np.zeros(seq_len, dtype=np.int64), 0
    for document_ids, document_mask in documents:
        span = slice(start, start + len(document_ids))
        ids[span], mask[span] = document_ids, document_mask
        positions[span] = np.arange(len(document_ids))
        start = span.stop
    positions[start:] = np.arange(seq_len - start)
    return ids[None], positions[None], mask[None]


class HeldOutLosses(NamedTuple):
    """The loss of all held-out documents, and by source."""

    whole: float
    by_source: dict[str, float]


class HeldOut:
    """The held-out documents of a run, or `at_most` of each source drawn by `seed`, as batches.
    Raises `UserError` if none has a trained token."""

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
        self._store, self._micro_batch_size = store, micro_batch_size
        documents, sources = store.heldout_documents(), store.heldout_sources()
        size = 2 if store.examples in PAIRED else 1
        starts_of: dict[str, list[int]] = {}
        for start in range(0, len(sources), size):
            starts_of.setdefault(sources[start], []).append(start)
        self._units: dict[str, list[range]] = {}  # by source: the documents of each example
        for name, starts in starts_of.items():
            chosen = choose_documents([documents[n] for n in starts], at_most=at_most, seed=seed)
            if chosen:
                self._units[name] = [range(starts[n], starts[n] + size) for n in chosen]
        if not self._units:
            raise UserError(
                "train.evaluate_every_steps asks for the held-out loss, and no held-out document "
                "has a trained token. "
                "Set it to null, or give held-out data (data.heldout, data.heldout_share)."
            )
        self._numbers = [n for units in self._units.values() for unit in units for n in unit]
        self._rows, self._seq_len = self._packed()

    def _packed(self) -> tuple[list[list[int]], int]:
        """Return the numbers of the documents of each row, and the tokens of a row."""
        documents = self._store.heldout_documents()
        lengths = [len(documents[number][0]) for number in self._numbers]
        seq_len = max(self._store.seq_len, *lengths)
        packed = heldout_rows(lengths, seq_len=seq_len)
        return [[self._numbers[index] for index in row] for row in packed], seq_len

    def due(self, step: int) -> bool:
        """Tell whether the loss is measured after `step` (1-based): every so many, and the last."""
        return step % self._every == 0 or step == self._num_steps

    def losses(self, training: CausalLMForTraining, *, world: World) -> HeldOutLosses:
        """Return the objective's loss of an example (`Objective.example_losses`), of all and of
        each source's, equal on all processes: for supervised training the mean -log p (nats) of a
        trained token, by their weights. Collective."""
        batches = partial(self._batches, world)
        objective, start = training.objective, training.reference
        losses = self._sums(token_losses(training, batches(), objective), world)
        reference, paired = None, self._store.examples in PAIRED
        if paired and start is not None:
            reference = self._sums(start.log_probs(training, batches()), world)[0]
        elif paired and self._store.scores is not None:
            reference = self._scored()
        sums, sizes = objective.example_losses(self._documents(losses, reference))
        by_source, first = {}, 0
        for name, units in self._units.items():
            part = slice(first, first + len(units))
            by_source[name] = float(sums[part].sum() / sizes[part].sum())
            first = part.stop
        return HeldOutLosses(float(sums.sum() / sizes.sum()), by_source)

    def _sums(self, values: Sequence[torch.Tensor], world: World) -> torch.Tensor:
        """Return each document's sums (2, documents) float64 over its trained tokens, of values and
        of weighted ones, from this process's batches. Collective."""
        place_of = {number: index for index, number in enumerate(self._numbers)}
        sums = torch.zeros(2, len(self._numbers), dtype=torch.float64)
        for rows, losses in zip(self._own_rows(world), values, strict=True):
            numbers = [number for row in rows for number in row]
            weights = [self._store.heldout_weights(number) for number in numbers]
            indices = [place_of[n] for n, x in zip(numbers, weights, strict=True) for _ in x]
            own_tokens = self._own_tokens(rows, world)
            own = losses.cpu().double()
            weighted = own * torch.from_numpy(np.concatenate([*weights, np.empty(0)]))[own_tokens]
            documents = torch.tensor(indices, dtype=torch.int64)[own_tokens]
            sums.index_add_(1, documents, torch.stack([own, weighted]))
        total = sums.to(world.device)
        dist.all_reduce(total)
        return total.cpu()

    def _scored(self) -> torch.Tensor:
        scores = self._store.scores
        sums = [scores.heldout(n).log_probs.sum(dtype=float) for n in self._numbers]
        return torch.tensor(sums, dtype=torch.float64)

    def _documents(self, losses: torch.Tensor, reference: torch.Tensor | None) -> DocumentSums:
        weights = [self._store.heldout_weights(number) for number in self._numbers]
        good = self._store.heldout_desirable
        return DocumentSums(
            log_p=-losses[0],
            tokens=torch.tensor([len(x) for x in weights], dtype=torch.float64),
            loss=losses[1],
            weight=torch.tensor([x.sum() for x in weights], dtype=torch.float64),
            reference=reference,
            desirable=None if good is None else torch.from_numpy(good[self._numbers]),
        )

    def _own_rows(self, world: World) -> Iterator[list[list[int]]]:
        """Yield the rows of this process's batches; a row without documents is padding alone. All
        processes have equally many, because each gathers the weights."""
        own = self._rows[world.row_group :: world.row_groups]
        num_rows = math.ceil(len(self._rows) / world.row_groups)  # of the process with the most
        own = [*own, *([] for _ in range(num_rows - len(own)))]
        for start in range(0, num_rows, self._micro_batch_size):
            yield own[start : start + self._micro_batch_size]

    def _own_tokens(self, rows: Sequence[Sequence[int]], world: World) -> torch.Tensor | slice:
        """Return the index of the trained tokens of rows (n,) that are in this process's slices."""
        if world.context is None:
            return slice(None)
        documents = self._store.heldout_documents()
        masks = [
            rows_of_documents([documents[n] for n in row], seq_len=self._seq_len)[2] for row in rows
        ]
        predicting = torch.from_numpy(np.concatenate(masks).nonzero()[1] - 1)
        return predicting // world.slice_tokens(self._seq_len) == world.context.rank()

    def _batches(self, world: World) -> Iterator[MicroBatch]:
        for rows in self._own_rows(world):
            yield cut_rows(self._batch(rows), world.context).to(world.device)
            world.moved()

    def _batch(self, rows: Sequence[Sequence[int]]) -> MicroBatch:
        documents, scores = self._store.heldout_documents(), self._store.scores
        arrays = [
            rows_of_documents([documents[n] for n in row], seq_len=self._seq_len) for row in rows
        ]
        ids, positions, mask = (np.concatenate(x) for x in zip(*arrays, strict=True))
        batch = make_batch(ids, positions, mask, device=torch.device("cpu"))
        if scores is None:
            return batch
        numbers = [number for row in rows for number in row] or [0]
        return with_scores(batch, [scores.heldout(number) for number in numbers])


def patience_is_over(losses: Sequence[float], patience: int | None) -> bool:
    """Tell whether none of the last `patience` losses is the lowest so far; null: never."""
    if patience is None or len(losses) <= patience:
        return False
    before, last = losses[:-patience], losses[-patience:]
    return not any(loss < min(before) for loss in last)


class BestAdapter:
    """Keeps the adapter with the lowest held-out loss in the checkpoints' folder. All processes
    call all methods. rows: the run's metrics up to its resumed step. Removes adapters that a killed
    process kept after that step. Raises `UserError` if the best adapter of the rows is missing."""

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
                f"{folder}. Set train.select to last, or move the folder away to train anew."
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
        dist.barrier(self._world.io_group)  # all processes write into the folder
        save_adapter(training, partial, world=self._world)
        if self._world.is_main:
            shutil.rmtree(best_dir(self._folder, step), ignore_errors=True)
            partial.rename(best_dir(self._folder, step))
            self._prune()
        # From here on other processes may read it (`load_`).
        dist.barrier(self._world.io_group)

    def load_(self, training: nn.Module) -> None:
        load_adapter_(training, best_dir(self._folder, self.step))

    def _prune(self) -> None:
        """Remove adapters that no resumed run needs. Needed are the best one at each checkpoint,
        and all after the newest, as the next checkpoint may be in progress."""
        saved = saved_steps(self._folder)
        steps = {max((s for s in self._steps if s <= at), default=0) for at in saved}
        steps |= {step for step in self._steps if step > max(saved, default=0)}
        needed = {best_dir(self._folder, step) for step in steps}
        for path in self._folder.glob(".best-*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        for path in set(self._folder.glob("best-*")) - needed:
            discard(path)


def best_dir(folder: Path, step: int) -> Path:
    """Return the folder of the adapter that was the best at its save, after `step` steps."""
    return folder / f"best-{step:08d}"
