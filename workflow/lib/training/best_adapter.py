"""Held-out loss while a run trains, and the adapter with the lowest.

Documents are packed into rows as in training and go through the training model itself, sharded as
it is. The best adapter is kept beside the checkpoints, in a folder `best-<8 digits>`, for each of
them: a run that resumes from any checkpoint finds the best adapter of that time."""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from workflow.lib.artifacts.checkpoint_folder import saved_steps
from workflow.lib.data.tokens.token_store import TokenStore, choose_documents
from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.distributed.world import World
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.training_module import CausalLMForTraining, loss_in
from workflow.lib.system.errors import UserError
from workflow.lib.training.batches import make_batch, with_examples, with_scores
from workflow.lib.training.checkpoint import discard, load_adapter_, save_adapter
from workflow.lib.training.gradients import step_estimate


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


class HeldOutRows(NamedTuple):
    """Held-out documents packed into rows, arrays (rows, seq_len) like the training rows; the
    padding of a row is one more document without a trained token."""

    input_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    desirable: npt.NDArray[np.bool_] | None

    @property
    def weights_per_row(self) -> npt.NDArray[Any]:
        counts: npt.NDArray[Any] = self.loss_mask.sum(axis=1)
        return counts

    @classmethod
    def of(cls, store: TokenStore, rows: Sequence[Sequence[int]], *, seq_len: int) -> Self:
        """Return rows with these documents; a row without documents is padding alone."""
        documents, good = store.heldout_documents(), store.heldout_desirable
        shape = (len(rows), seq_len)
        ids, position_ids = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        mask, desirable = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
        for row, numbers in enumerate(rows):
            start = 0
            for number in numbers:
                document_ids, document_mask = documents[number]
                span = slice(start, start + len(document_ids))
                ids[row, span], mask[row, span] = document_ids, document_mask
                position_ids[row, span] = np.arange(len(document_ids))
                desirable[row, span] = good is not None and good[number]
                start = span.stop
            position_ids[row, start:] = np.arange(seq_len - start)
        return cls(ids, position_ids, mask, None if good is None else desirable)


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
        size = 1 if store.examples == "texts" else 2
        # by source: the held-out documents in each row, and the tokens of a row
        self._sources: dict[str, tuple[list[list[int]], int]] = {}
        starts_of: dict[str, list[int]] = {}
        for start in range(0, len(sources), size):
            starts_of.setdefault(sources[start], []).append(start)
        for name, starts in starts_of.items():
            chosen = choose_documents([documents[n] for n in starts], at_most=at_most, seed=seed)
            units = [range(starts[number], starts[number] + size) for number in chosen]
            if units:
                self._sources[name] = self._packed(units)
        if not self._sources:
            raise UserError(
                "train.evaluate_every_steps asks for the held-out loss, and no held-out document "
                "has a trained token. "
                "Set it to null, or give held-out data (data.heldout, data.heldout_share)."
            )

    def _packed(self, units: Sequence[range]) -> tuple[list[list[int]], int]:
        documents = self._store.heldout_documents()
        lengths = [sum(len(documents[number][0]) for number in unit) for unit in units]
        seq_len = max(self._store.seq_len, *lengths)
        packed = heldout_rows(lengths, seq_len=seq_len)
        return [[number for unit in row for number in units[unit]] for row in packed], seq_len

    def due(self, step: int) -> bool:
        """Tell whether the loss is measured after `step` (1-based): every so many, and the last."""
        return step % self._every == 0 or step == self._num_steps

    def losses(
        self,
        training: CausalLMForTraining,
        *,
        world: World,
        moved: Callable[[], None] = lambda: None,
    ) -> HeldOutLosses:
        """Return the objective's loss of each source's documents as one step, equal on all
        processes: for supervised training the mean -log p (nats) of a trained token. Collective.
        Calls `moved` after every batch."""
        was_training = training.training
        training.eval()
        sums, divisors = {}, {}
        for name, (rows, seq_len) in self._sources.items():
            by_row = [
                training.objective.step_sizes(self._arrays([row], seq_len), np.arange(1))
                for row in rows
            ]
            sizes = tuple(map(sum, zip(*by_row, strict=True)))
            batches = partial(self._batches, name, world, sizes, moved)
            estimate = step_estimate(training, batches(), divisor=sizes[0], world=world)
            total = torch.zeros((), dtype=torch.float64, device=world.device)
            with forward_only(training):
                for batch in batches():
                    total += loss_in(training(replace(batch, estimate=estimate)))
            dist.all_reduce(total)
            sums[name], divisors[name] = float(total), sizes[0]
        training.train(was_training)
        by_source = {name: sums[name] / divisors[name] for name in sums}
        return HeldOutLosses(sum(sums.values()) / sum(divisors.values()), by_source)

    def _arrays(self, rows: Sequence[Sequence[int]], seq_len: int) -> HeldOutRows:
        return HeldOutRows.of(self._store, rows, seq_len=seq_len)

    def _batches(
        self, source: str, world: World, sizes: tuple[float, ...], moved: Callable[[], None]
    ) -> Iterator[MicroBatch]:
        """Yield this process's rows; call `moved` after each batch. All processes have equally many
        batches, because each gathers the weights."""
        of_step = torch.tensor(sizes) if len(sizes) > 1 else None
        of_source, seq_len = self._sources[source]
        own_rows = of_source[world.rank :: world.size]
        num_rows = math.ceil(len(of_source) / world.size)  # of the process with the most
        for start in range(0, num_rows, self._micro_batch_size):
            count = min(self._micro_batch_size, num_rows - start)
            rows = own_rows[start : start + count]
            batch = self._batch([*rows, *([] for _ in range(count - len(rows)))], seq_len)
            yield replace(batch, step_sizes=of_step).to(world.device)
            moved()

    def _batch(self, rows: Sequence[Sequence[int]], seq_len: int) -> MicroBatch:
        ids, positions, mask, desirable = self._arrays(rows, seq_len)
        batch = make_batch(ids, positions, mask, device=torch.device("cpu"))
        if self._store.examples != "texts":
            batch = with_examples(batch, desirable)
        if self._store.scores is None:
            return batch
        numbers = [number for row in rows for number in row] or [0]
        return with_scores(batch, [self._store.scores.heldout(number) for number in numbers])


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
