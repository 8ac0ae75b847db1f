"""A vocabulary shared by processes: each holds a slice of the rows of embedding and output head,
and no table is ever gathered.

Rows are exchanged instead: hidden states of trained tokens to all slices of the head, and their
gradients back; token ids to the owners of their embeddings, and the rows back. So the largest
buffer is one chunk of rows for any vocabulary. The parallel cross-entropy is Megatron-LM's (arXiv
1909.08053, section 3), applied also to the rows of processes that share the data. All functions
that communicate are collective over `group`, the processes that share the vocabulary."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from workflow.lib.distributed.world import vocabulary_mesh
from workflow.lib.kernels.loss.fused_logits import ELSEWHERE, IGNORED, FusedLogits, head_matmul
from workflow.lib.model.host_embedding import look_up_elsewhere_, other_tables
from workflow.lib.model.lora import ROWS
from workflow.lib.model.loss.chunked_loss import (
    LinearCrossEntropy,
    Outcomes,
    OutputHead,
    TrainedHead,
    over_slices,
)
from workflow.lib.model.loss.vocabulary_slices import exchanged_rows
from workflow.lib.model.nf4_model import local, local_range
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.objectives.objective import Teacher
from workflow.lib.system.device_types import GPUS

# Renamed in torch 2.13; the old names warn there.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def share_vocabulary_(training: CausalLMForTraining, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Cut embedding, head and other tables of tokens into slices; return these parameters, which
    FSDP must ignore. mesh: of `process_mesh`. Call on a meta-device model. A tied table stays one
    parameter; an embedding without rows does not change."""
    mesh, axis = vocabulary_mesh(mesh)
    model: Any = training.peft_model.get_base_model()  # type: ignore[operator]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    group = axis.get_group()
    weight = _sliced(head.weight, mesh, axis)
    bias = None if head.bias is None else _sliced(head.bias, mesh, axis)
    if embedding.weight is head.weight:
        embedding.weight = weight
    elif len(embedding.weight):
        embedding.weight = _sliced(embedding.weight, mesh, axis)
    shared = SlicedHead(weight, bias, group)
    if hasattr(head, ROWS):
        setattr(shared, ROWS, getattr(head, ROWS))
    model.set_output_embeddings(shared)
    training.divide_(
        SlicedCrossEntropy(replace(training.head_loss.head, module=shared), group),
        rows_of=ExchangedRows(embedding, group, model.config.dtype),
    )
    others = [_shared_table(table, mesh, axis, model.config.dtype) for table in other_tables(model)]
    return {p for p in (embedding.weight, weight, bias, *others) if p is not None}


def _shared_table(
    table: nn.Embedding, mesh: DeviceMesh, axis: DeviceMesh, dtype: torch.dtype
) -> nn.Parameter:
    weight = table.weight
    assert isinstance(weight, nn.Parameter)
    table.weight = own_rows = _sliced(weight, mesh, axis)
    look_up_elsewhere_(table, ExchangedRows(table, axis.get_group(), dtype))
    return own_rows


def _sliced(table: nn.Parameter, mesh: DeviceMesh, axis: DeviceMesh) -> nn.Parameter:
    """Return a meta table as this process's rows, cut along `axis` as FSDP2 cuts."""
    placements: list[Placement] = [
        Shard(0) if (name,) == axis.mesh_dim_names else Replicate()
        for name in mesh.mesh_dim_names or ()
    ]
    size, stride = table.shape, table.stride()

    def part(rows: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            rows, mesh, placements, run_check=False, shape=size, stride=stride
        )

    start, stop = local_range(part(table.detach()[:0]))
    own_rows = part(table.detach()[start:stop])
    return nn.Parameter(own_rows, requires_grad=table.requires_grad)


class SlicedHead(nn.Module):
    """A linear head sliced by rows: `weight` (vocab, hidden) and `bias` (vocab,) are DTensors."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._group = group

    def own_slice(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return local(self.weight), None if self.bias is None else local(self.bias)

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return all logits (..., vocab) of states (..., hidden), without gradients. Collective."""
        size, vocab = self._group.size(), self.weight.shape[0]
        own_rows = hidden.flatten(0, -2)
        rows = largest_count(len(own_rows))
        states = _gathered(_padded(own_rows, rows, fill=0), self._group)
        part = head_matmul(states, *self.own_slice())
        part = nn.functional.pad(part, (0, -(-vocab // size) - part.shape[1]))
        slices = torch.empty_like(part)
        dist.all_to_all_single(slices, part, group=self._group)
        whole = slices.view(size, rows, -1).transpose(0, 1).flatten(1)
        return whole[: len(own_rows), :vocab].reshape(*hidden.shape[:-1], vocab)


class SlicedCrossEntropy(LinearCrossEntropy):
    """The loss of this process's rows by a `SlicedHead`. Collective; row counts may differ."""

    def __init__(self, head: OutputHead, group: dist.ProcessGroup) -> None:
        super().__init__(head)
        self._group = group
        self._equal_rows = False

    def chunk_rows(self) -> int:
        return self.head.chunk_rows(self._group.size())

    @contextmanager
    def equal_rows(self) -> Iterator[None]:
        self._equal_rows = True
        try:
            yield
        finally:
            self._equal_rows = False

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """Yield the rows of each chunk of the loss of `num_rows` rows. Collective."""
        # Every process takes part in every chunk, so their number follows the most rows.
        num_rows = num_rows if self._equal_rows else largest_count(num_rows)
        size = self.chunk_rows()
        for start in range(0, num_rows, size):
            yield slice(start, min(start + size, num_rows))

    def weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert isinstance(self.head.module, SlicedHead)
        return self.head.module.own_slice()

    def chunk_losses(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        rows: slice,
        trained: TrainedHead | None,
        teacher: Teacher | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the same of this process's rows of a chunk. Collective."""
        count, group = rows.stop - rows.start, self._group
        if weights is not None and trained is not None:  # this slice's gradient is over all rows
            weights = _gathered(_padded(weights[rows], count, fill=0), group)
        own_states = _padded(hidden[rows], count, fill=0)
        all_targets = _gathered(_padded(targets[rows], count, fill=IGNORED), group)
        states = _gathered(own_states, group)
        num_rows = len(hidden[rows])
        assert isinstance(self.head.module, SlicedHead)
        ranges = local_range(self.head.module.weight)
        columns = _TargetColumns(all_targets, ranges)
        gradient: Callable[[], torch.Tensor]
        if teacher is None:
            part_of = _FusedPart if self.by_kernels(states) else _StoredPart
            part = part_of(self, states, columns, weights, trained)
            log_sums, chosen = _over_slices(*part.sums(), group)
            losses = (log_sums - chosen).masked_fill(all_targets == IGNORED, 0.0)
            gradient = partial(part.gradient, log_sums)
        else:
            taught = _StoredPart(self, states, columns, weights, trained)
            teacher = _gathered_teacher(teacher.of(rows), count, group)
            outcomes = Outcomes(taught.logits, all_targets, teacher, first=ranges[0])
            own_numbers = outcomes.numbers()
            every = _gathered(own_numbers, group).view(group.size(), *own_numbers.shape)
            numbers = over_slices(every)
            losses = outcomes.losses(numbers)
            gradient = lambda: taught.slopes_gradient(outcomes.slopes(numbers))  # noqa: E731
        losses = losses[group.rank() * count :][:num_rows]
        if not torch.is_grad_enabled():
            return losses, None
        grad = gradient().float()  # of this slice; added up in fp32
        own_grad = torch.empty_like(grad[:count])
        REDUCE_SCATTER(own_grad, grad, group=group)
        return losses, own_grad[:num_rows]


class _TargetColumns:
    """The columns of all processes' targets (rows,) in logits of rows `start` to `stop`."""

    def __init__(self, targets: torch.Tensor, ranges: tuple[int, int]) -> None:
        start, stop = ranges
        self._empty = start == stop
        self._inside = (targets >= start) & (targets < stop)
        self._columns = (targets - start).clamp(0, max(0, stop - start - 1))[:, None]
        self.ignored = targets == IGNORED

    def numbers(self) -> torch.Tensor:
        """Return (rows,): `ELSEWHERE` for targets in another slice, `IGNORED` for none."""
        columns = self._columns[:, 0].masked_fill(~self._inside, ELSEWHERE)
        return columns.masked_fill_(self.ignored, IGNORED)

    def chosen(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logit (rows,) of each target that is in this slice, 0 for the others."""
        if self._empty:
            return logits.new_zeros(len(logits))
        return logits.gather(1, self._columns)[:, 0].masked_fill(~self._inside, 0.0)

    def subtract_one_(self, probabilities: torch.Tensor) -> None:
        if not self._empty:
            ones = self._inside[:, None].to(probabilities.dtype)
            probabilities.scatter_add_(1, self._columns, -ones)


@dataclass
class _Part:
    """Inputs of a slice's logits: states (rows, hidden), `loss`'s head, trained rows' weights."""

    loss: SlicedCrossEntropy
    states: torch.Tensor
    columns: _TargetColumns
    weights: torch.Tensor | None
    trained: TrainedHead | None


class _StoredPart(_Part):
    """The logits of a slice, in fp32, which their own gradients overwrite."""

    @cached_property
    def _leaf_and_logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss.leaf_and_logits(self.states, self.trained)

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-sum-exp over the slice, and the target's logit there or 0; (rows,) fp32."""
        return self.logits.logsumexp(dim=1), self.columns.chosen(self.logits)

    @property
    def logits(self) -> torch.Tensor:
        """The logits (rows, columns), without a gradient."""
        return self._leaf_and_logits[1].detach()

    def gradient(self, log_sums: torch.Tensor) -> torch.Tensor:
        """Return the slice's share of the states' gradient (rows, hidden); log_sums: of all."""
        slope = self.logits.sub_(log_sums[:, None]).exp_()  # autograd keeps no logits
        self.columns.subtract_one_(slope)
        slope.masked_fill_(self.columns.ignored[:, None], 0.0)
        return self.slopes_gradient(slope)

    def slopes_gradient(self, slope: torch.Tensor) -> torch.Tensor:
        """Return the same for slopes (rows, columns) by the logits."""
        leaf, logits = self._leaf_and_logits
        (leaf_grad,) = torch.autograd.grad(logits, leaf, slope)
        if self.trained is None:
            return leaf_grad
        return self.trained.backward(self.states, leaf_grad, self.weights)


class _FusedPart(_Part):
    """The same with kernels."""

    @cached_property
    def _logits(self) -> FusedLogits:
        return self.loss.fused_logits(self.states, self.trained)

    @cached_property
    def _numbers(self) -> torch.Tensor:
        return self.columns.numbers()

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._logits.sums(self._numbers)

    def gradient(self, log_sums: torch.Tensor) -> torch.Tensor:
        slopes = self._logits.slopes(log_sums, self._numbers)
        return self.loss.states_gradient(slopes, self.states, self.weights, self.trained)


def _gathered_teacher(teacher: Teacher, count: int, group: dist.ProcessGroup) -> Teacher:
    """Return the teachers' outcomes on all processes, for `count` rows each."""
    ids, log_probs = (_gathered(_padded(x, count, fill=0), group) for x in teacher[:2])
    return teacher._replace(ids=ids, log_probs=log_probs)


def _over_slices(
    log_sums: torch.Tensor, chosen: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-sum-exp and target logit (rows,) fp32 over the slices of all processes."""
    part = torch.stack([log_sums, chosen])
    parts = _gathered(part, group).view(group.size(), *part.shape)
    return parts[:, 0].logsumexp(dim=0), parts[:, 1].sum(dim=0)


class ExchangedRows:
    """Rows of an embedding whose table (vocab, hidden) is sliced over `group`: ids go to all, and
    each adds its own rows. For a trained table backward sends the rows' gradients the same way, and
    the owners add them up in fp32."""

    def __init__(self, embedding: nn.Module, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        """dtype: of the rows."""
        self._embedding, self._group, self._dtype = embedding, group, dtype
        self._padding = getattr(embedding, "padding_idx", None)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows (n, hidden) of ids (n,), equally many on all. Collective, also backward."""
        table = self._embedding.weight
        assert isinstance(table, DTensor)
        if table.requires_grad:
            look_up: Callable[..., torch.Tensor] = _TrainedRows.apply
            return look_up(table.to_local(), ids, self, local_range(table))
        return self.looked_up(local(table), ids, local_range(table))

    @torch.no_grad()
    def looked_up(
        self, table: torch.Tensor, ids: torch.Tensor, ranges: tuple[int, int]
    ) -> torch.Tensor:
        """Return the rows of ids; this process has the rows of `ranges` in `table`. Collective."""
        return torch.cat([self._chunk(table, chunk, ranges) for chunk in self._split(ids)])

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(rows, exchanged_rows(self._group.size()))

    def _chunk(
        self, table: torch.Tensor, ids: torch.Tensor, ranges: tuple[int, int]
    ) -> torch.Tensor:
        start, stop = ranges
        all_ids = _gathered(ids, self._group)
        rows = table.new_zeros(len(all_ids), table.shape[1])
        if start < stop:
            absent, indices = _located(all_ids, ranges)
            torch.index_select(table, 0, indices, out=rows)
            rows.masked_fill_(absent[:, None], 0.0)
        rows = rows.to(self._dtype)
        own_rows = torch.empty_like(rows[: len(ids)])
        REDUCE_SCATTER(own_rows, rows, group=self._group)  # exact: all but one are 0
        return own_rows

    def gradient(
        self, grad: torch.Tensor, ids: torch.Tensor, ranges: tuple[int, int]
    ) -> torch.Tensor:
        """Return the gradient (stop - start, hidden) fp32 of this process's rows of the table.
        Collective. grad: (n, hidden), of this process's rows of ids (n,)."""
        start, stop = ranges
        total = grad.new_zeros(stop - start, grad.shape[1], dtype=torch.float32)
        for own_ids, own_grad in zip(self._split(ids), self._split(grad), strict=True):
            all_ids = _gathered(own_ids, self._group)
            rows = _gathered(own_grad.contiguous(), self._group)
            if start == stop:
                continue
            absent, indices = _located(all_ids, ranges)
            if self._padding is not None:  # torch gives the padding row no gradient
                absent |= all_ids == self._padding
            _add_rows_(total, indices, rows.float().masked_fill_(absent[:, None], 0.0))
        return total


class _TrainedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        table: torch.Tensor,
        ids: torch.Tensor,
        exchange: ExchangedRows,
        ranges: tuple[int, int],
    ) -> torch.Tensor:
        ctx.exchange, ctx.ids, ctx.ranges = exchange, ids, ranges
        return exchange.looked_up(table, ids, ranges)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.exchange.gradient(grads[0], ctx.ids, ctx.ranges), None, None, None


def _located(ids: torch.Tensor, ranges: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which ids (n,) lie outside the rows `ranges`, and the index of each in them."""
    start, stop = ranges
    return (ids < start) | (ids >= stop), (ids - start).clamp(0, stop - start - 1)


def _add_rows_(total: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    """Add each row at its index, duplicates always in the same order."""
    # Atomic additions have a random order: index_add_ uses them on a GPU, index_put_ on a CPU.
    if total.device.type in GPUS:
        total.index_put_((indices,), rows, accumulate=True)  # sorts first
    else:
        total.index_add_(0, indices, rows)  # one after the other


def largest_count(count: int) -> int:
    """Return the largest `count` of any process, on the CPU: no GPU's queue waits. Collective."""
    largest = torch.tensor(count)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _padded(rows: torch.Tensor, count: int, *, fill: int) -> torch.Tensor:
    """Return `count` rows: the given ones, then rows of `fill`."""
    if len(rows) == count:
        return rows.contiguous()
    return torch.cat([rows, rows.new_full((count - len(rows), *rows.shape[1:]), fill)])


def _gathered(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows of all processes, concatenated; all have equal numbers."""
    whole = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    ALL_GATHER(whole, rows, group=group)
    return whole
