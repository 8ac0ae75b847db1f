"""From rows of the tokens folder to the tensors of a forward pass, and the rows of each step.

Data order is a pure function of (seed, step): every process knows the rows of all, and from them
the divisor of a step's loss.
A thread makes the next micro-batch in host memory during the current one, so the device does not
wait for it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from workflow.lib.data.tokens.packing import text_lengths
from workflow.lib.data.tokens.token_store import OPTIONAL, TokenStore
from workflow.lib.distributed.world import World
from workflow.lib.kernels.attention.answer_rows import kept_tokens, padded_length
from workflow.lib.kernels.attention.head_exchange import RowCut
from workflow.lib.kernels.attention.packed import document_bounds
from workflow.lib.kernels.attention.shared_prompts import SharedPrompts
from workflow.lib.model.documents import documents_of
from workflow.lib.model.host_embedding import StoredRows
from workflow.lib.model.layers.adapter_dropout import row_keys
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.objectives.objective import BY_TOKEN
from workflow.lib.scores.store import Scores
from workflow.lib.settings.config import TrainConfig
from workflow.lib.settings.objectives import PAIRED
from workflow.lib.settings.schedule import step_rows


def attention_costs(position_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the attention cost of each row of (rows, seq_len): the sum of the squared lengths of
    its documents. A document of n tokens has the positions 0 to n - 1, and the sum of 2 p + 1 over
    them is n squared."""
    sums: npt.NDArray[np.int64] = position_ids.sum(axis=1, dtype=np.int64)
    costs: npt.NDArray[np.int64] = 2 * sums + position_ids.shape[1]
    return costs


def shared_lengths(store: TokenStore, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the tokens of each row once its examples share their prompts, without padding."""
    arrays = (store.input_ids[rows], store.position_ids[rows], store.loss_mask[rows])
    kept = kept_tokens(*arrays, paired=store.examples in PAIRED)
    lengths: npt.NDArray[np.int64] = kept.sum(axis=1)
    return lengths


class RowNumbers:
    """A number of each row, above -1, computed once."""

    def __init__(
        self, num_rows: int, find: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
    ) -> None:
        self._find = find
        self._numbers = np.full(num_rows, -1, dtype=np.int64)

    def of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers of these rows; new ones are computed."""
        new = rows[self._numbers[rows] < 0]
        if len(new):
            self._numbers[new] = self._find(new)
        numbers: npt.NDArray[np.int64] = self._numbers[rows]
        return numbers


def process_rows(
    rows: npt.NDArray[np.int64], costs: npt.NDArray[np.int64], *, rank: int, size: int
) -> npt.NDArray[np.int64]:
    """Return process `rank`'s part of a step's rows, of `size` processes, in training order. All
    processes wait for the slowest at every micro-batch. So the rows are dealt like cards, the
    costliest first and every second round backwards: the processes take rows of similar cost at the
    same time."""
    assert len(rows) % size == 0, f"{len(rows)} rows cannot be shared equally by {size} processes"
    rounds = rows[np.argsort(-costs, kind="stable")].reshape(-1, size)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds[:, rank]


class RowGroup(NamedTuple):
    """The rows of a process's micro-batch."""

    indices: npt.NDArray[np.int64]  # (micro_batch_size,), in the tokens folder
    keys: list[int]  # as many, of `adapter_dropout.row_keys`
    step_sizes: tuple[float, ...] = (1.0,)
    """Of `Objective.step_sizes`; set where there are several."""
    row_tokens: int | None = None
    """Tokens of rows whose examples share their prompts; None: they do not."""


def micro_batches(
    store: TokenStore,
    groups: Iterable[RowGroup],
    *,
    device: torch.device,
    context: dist.ProcessGroup | None = None,
    look_up: Callable[[torch.Tensor], torch.Tensor] | None = None,
    stay_on_host: bool = False,
    apart: bool = False,
) -> Iterator[MicroBatch]:
    """Yield a micro-batch on `device` for each group of rows, and make the next one meanwhile.
    context: of `World`. look_up: embedding rows (n, hidden), in (page-locked) host memory, of ids
    (n,). stay_on_host: yield them in page-locked host memory instead. apart: with their
    `documents`, for recurrent layers."""

    def load(group: RowGroup) -> MicroBatch:
        keys = torch.tensor(group.keys, dtype=torch.int64)
        batch = stored_batch(store, group.indices, row_tokens=group.row_tokens)
        batch = cut_rows(replace(batch, row_keys=keys), context)
        if len(group.step_sizes) > 1:
            batch = replace(batch, step_sizes=torch.tensor(group.step_sizes))
        if look_up is not None:
            batch = replace(batch, embedded=look_up(batch.input_ids.flatten()))
        if apart:
            batch = replace(batch, documents=documents_of(batch.bounds[0].diff().tolist()))
        return batch.pinned() if device.type == "cuda" else batch

    def placed(batch: MicroBatch) -> MicroBatch:
        # the computing stream copies it: the step that uses it is queued after the copy
        return batch if stay_on_host else batch.to(device)

    ahead: Future[MicroBatch] | None = None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as thread:
        for group in groups:
            current, ahead = ahead, thread.submit(load, group)
            if current is not None:
                yield placed(current.result())
        if ahead is not None:
            yield placed(ahead.result())


def stored_batch(
    store: TokenStore, rows: npt.NDArray[np.int64], *, row_tokens: int | None = None
) -> MicroBatch:
    """Return the micro-batch of some training rows in host memory, with the store's scores;
    row_tokens: as in `RowGroup`."""
    stored = [store.input_ids, store.position_ids, store.loss_mask, *store.optional.values()]
    arrays = [np.asarray(array[rows]) for array in stored]
    if row_tokens is not None:
        kept = kept_tokens(*arrays[:3], paired=store.examples in PAIRED)
        paddings = [np.arange(row_tokens) if array is arrays[1] else None for array in arrays]
        arrays = [
            _filled(array, kept=kept, row_tokens=row_tokens, padding=padding)
            for array, padding in zip(arrays, paddings, strict=True)
        ]
    ids, positions, mask, *values = arrays
    optional = dict(zip(store.optional, values, strict=True))
    batch = make_batch(
        ids.astype(np.int64),
        positions.astype(np.int64),
        mask,
        by_token={name: x for name, x in optional.items() if OPTIONAL[name].per == "token"},
        device=torch.device("cpu"),
    )
    if row_tokens is not None:
        batch = replace(batch, shared=SharedPrompts.of(batch.position_ids.numpy()))
    if store.examples in PAIRED:
        batch = with_examples(batch, optional.get("desirable"))
    return batch if store.scores is None else with_scores(batch, [store.scores.for_rows(rows)])


def _filled(
    array: npt.NDArray[Any],
    *,
    kept: npt.NDArray[np.bool_],
    row_tokens: int,
    padding: npt.NDArray[Any] | None = None,
) -> npt.NDArray[Any]:
    """Return the kept values of rows (rows, seq_len) as rows (rows, row_tokens), each padded with
    the first values of `padding`, by default zeros."""
    rows = np.zeros((len(array), row_tokens), dtype=array.dtype)
    for row, values, left in zip(rows, array, kept, strict=True):
        count = int(left.sum())
        row[:count] = values[left]
        row[count:] = 0 if padding is None else padding[: row_tokens - count]
    return rows


def with_examples(batch: MicroBatch, desirable: npt.NDArray[np.bool_] | None = None) -> MicroBatch:
    """Return a micro-batch in host memory whose examples are two consecutive documents each in a
    row. desirable: (rows, seq_len), of rated answers."""
    rows, seq_len = batch.input_ids.shape
    starts = batch.bounds[0][:-1].numpy()
    row = starts // seq_len
    documents = np.bincount(row, minlength=rows)
    number_in_row = np.arange(len(starts)) - (documents.cumsum() - documents)[row]
    # a row's padding, its last document, has no second one
    firsts = np.flatnonzero((number_in_row % 2 == 0) & (number_in_row + 1 < documents[row]))
    batch = replace(batch, firsts=torch.from_numpy(firsts))
    if desirable is None:
        return batch
    return replace(batch, desirable=torch.from_numpy(desirable.reshape(-1)[starts[firsts]]))


def with_scores(batch: MicroBatch, parts: Sequence[Scores]) -> MicroBatch:
    """Return a micro-batch in host memory with a reference's or teacher's scores of its trained
    tokens, in order; parts: of other tokens, for a batch without scores."""
    count = len(batch.targets)
    if parts[0].top_ids is None:
        return replace(batch, reference=_joined([part.log_probs for part in parts], count))
    return replace(
        batch,
        teacher_ids=_joined([part.top_ids for part in parts], count).long(),
        teacher_log_probs=_joined([part.outcomes() for part in parts], count),
    )


def _joined(arrays: Sequence[Any], count: int) -> torch.Tensor:
    whole = np.concatenate(arrays)
    assert len(whole) == count or not count, f"{len(whole)} scores of {count} trained tokens"
    return torch.from_numpy(whole[:count])


def cut_rows(batch: MicroBatch, context: dist.ProcessGroup | None) -> MicroBatch:
    """Return this process's slice of each row of a micro-batch in host memory; None: the batch.

    Rows are first padded to a multiple of the processes, at the end of their last documents: no
    token sees that, and none of it is trained. A trained token is in the slice that predicts it."""
    if context is None:
        return batch
    assert batch.shared is None, "documents of rows that processes share have their own prompts"
    seq_len = batch.input_ids.shape[1]
    width = -(-seq_len // context.size())
    padding = width * context.size() - seq_len
    first = width * context.rank()
    position_ids = torch.cat(
        [batch.position_ids, batch.position_ids[:, -1:].expand(-1, padding)], dim=1
    )
    input_ids = torch.nn.functional.pad(batch.input_ids, (0, padding))
    bounds = batch.bounds[0] + batch.bounds[0] // seq_len * padding
    row, position = batch.positions // seq_len, batch.positions % seq_len
    own = position // width == context.rank()
    by_token = {name: x[own] for name in BY_TOKEN if (x := getattr(batch, name)) is not None}
    return replace(
        batch,
        input_ids=input_ids[:, first : first + width].contiguous(),
        position_ids=position_ids[:, first : first + width].contiguous(),
        positions=(row * width + position - first)[own],
        bounds=(bounds, int(bounds.diff().max())),
        lengths=None if batch.lengths is None else (batch.lengths - first).clamp(0, width),
        cut=RowCut(context, position_ids, (batch.positions + row * padding)[own]),
        **by_token,
    )


def make_batch(
    input_ids: npt.NDArray[np.int64],
    position_ids: npt.NDArray[np.int64],
    loss_mask: npt.NDArray[np.bool_],
    *,
    by_token: Mapping[str, npt.NDArray[np.float32]] | None = None,
    device: torch.device,
) -> MicroBatch:
    """Build a micro-batch from arrays (rows, seq_len); token i is predicted at i - 1. by_token:
    values whose trained ones become fields."""
    flat_targets = np.flatnonzero(loss_mask)
    assert not loss_mask[:, 0].any(), (
        "the first token of a row has no predecessor to be predicted from"
    )
    bounds, longest = document_bounds(torch.from_numpy(position_ids))

    def put(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    fields: dict[str, Any] = {
        name: put(x.reshape(-1)[flat_targets]) for name, x in (by_token or {}).items()
    }
    return MicroBatch(
        input_ids=put(input_ids),
        position_ids=put(position_ids),
        positions=put(flat_targets - 1),
        targets=put(input_ids.reshape(-1)[flat_targets]),
        bounds=(bounds.to(device), longest),
        lengths=put(text_lengths(position_ids, loss_mask)),
        **fields,
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
