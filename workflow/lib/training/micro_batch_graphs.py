"""Micro-batches as CUDA graphs: one launch runs forward and backward, so the GPU does not wait for
Python.

A graph repeats captured kernels, with their addresses and shapes. So a micro-batch is first copied
into inputs of a fixed `Layout`: its trained positions, examples and bounds of documents get padding
without effect. The first micro-batch of a layout runs without a graph, which compiles and chooses
kernels; the second is captured. Nothing may wait for the device during a capture, so code that
depends on values on the device ends it with an error: then graphs are off, and the log has the
reason.

Collectives are captured too: FSDP2 begins and ends every micro-batch with shards alone, and its
streams join the capturing one, as does that of offloaded activations. All processes must run the
same graph, so they agree on every layout, and on whether a capture has failed anywhere."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from workflow.lib.distributed.fsdp import abandon_micro_batch_
from workflow.lib.distributed.world import World, any_of_all, largest_of_all
from workflow.lib.model.documents import (
    DocumentCapacity,
    Documents,
    capacity_tokens,
    document_capacity,
    documents_of,
)
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.training_module import CausalLMForTraining, loss_in
from workflow.lib.objectives.objective import BY_EXAMPLE, BY_TOKEN, PADDING
from workflow.lib.training.cuda_capture import Capture, CudaCapture, Replay, first_cause

logger = logging.getLogger("workflow")

SIZES = 4  # different counts of trained tokens, each with its own graph
LEAST_MORE = 4  # documents that a layout of packed rows has room for beside those seen
# Padded positions for each token of recurrent layers, in a capacity for all micro-batches so far.
# Documents that are split alone need about 1.2; 16 micro-batches of mixed chats 2.3 together.
MOST_POSITIONS = 2


class Layout(NamedTuple):
    """The fixed shapes of a graph, equal on all processes; the rest is copied into its inputs."""

    rows: int
    row_tokens: int
    trained_tokens: int  # padded
    documents: int  # Padded; as many as rows if every row is one document
    longest: int
    """Tokens that no document exceeds: attention starts a block of threads for every 128 of them,
    head and document, also of those that are padding."""
    copies: tuple[int, int]
    """Keys of shared prompts besides the tokens' own, padded; the most copies of a token."""
    capacity: DocumentCapacity
    """Of recurrent layers, for packed rows; () without any, or where rows are documents."""


def forward_backward(
    training: CausalLMForTraining, batch: MicroBatch, slope: torch.Tensor
) -> torch.Tensor:
    """Add a micro-batch's gradients times `slope` () fp32 to the parameters'; return its summed
    loss, with its figures if there are any. Its autograd graph, which holds hidden states, is freed
    at the end of the call."""
    result: torch.Tensor = training(batch)
    loss_in(result).backward(slope)
    training.after_backward()
    return result.detach()


class FixedInputs:
    """The device tensors that the graph of a layout reads."""

    def __init__(self, like: MicroBatch, layout: Layout, device: torch.device) -> None:
        lengths = dict.fromkeys(("positions", *BY_TOKEN), layout.trained_tokens)
        lengths |= dict.fromkeys(BY_EXAMPLE, layout.documents // 2)
        (more, turns), tokens = layout.copies, layout.rows * layout.row_tokens
        key_lengths = {"keys": tokens + more, "copies": turns, "bounds": layout.documents + 1}
        padded = replace(
            like,
            bounds=(like.bounds[0].new_empty(layout.documents + 1), layout.longest),
            documents=_laid_out(like, layout) if layout.capacity else None,
            shared=like.shared
            and replace(
                like.shared, longest=2 * layout.longest, **_empty(like.shared, key_lengths)
            ),
            **_empty(like, lengths),
        )
        self.batch = padded.each(lambda values: torch.empty_like(values, device=device))
        if not layout.capacity:
            self.batch = replace(self.batch, documents=like.documents)
        self._layout = layout

    def fill(self, batch: MicroBatch) -> None:
        """Copy a micro-batch into them, without waiting for it. Padding is no target, and documents
        without a token at the end."""
        fixed = self.batch
        assert batch.bounds[1] <= fixed.bounds[1], "attention would not see all of a document"
        _copy_(fixed, batch, PADDING | {"bounds": batch.input_ids.numel()})
        if batch.shared is not None:
            assert fixed.shared is not None
            assert batch.shared.longest <= fixed.shared.longest, "nor all of its keys"
            _copy_(fixed.shared, batch.shared, {"copies": -1, "bounds": len(batch.shared.keys)})
        if self._layout.capacity:
            documents = _laid_out(batch, self._layout)
            if fixed.input_ids.is_cuda:
                documents = documents.each(torch.Tensor.pin_memory)
            _copy_(fixed.documents, documents, {})


def _empty(like: object, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Return tensors of these lengths like the fields of these names."""
    fields = {name: x for name in lengths if (x := getattr(like, name)) is not None}
    return {name: x.new_empty(lengths[name], *x.shape[1:]) for name, x in fields.items()}


def _laid_out(batch: MicroBatch, layout: Layout) -> Documents:
    assert batch.documents is not None, "recurrent layers take rows apart"
    longest = batch.input_ids.shape[1]
    return documents_of(batch.documents.lengths, capacity=layout.capacity, longest=longest)


def _copy_(fixed: object, values: object, padding: Mapping[str, int]) -> None:
    """Copy the tensors of `values`, each to the beginning of a fixed one; padding: 0 for others."""
    for name, target in vars(fixed).items():
        source = getattr(values, name)
        assert (target is None) is (source is None), f"only some micro-batches have {name}"
        if isinstance(target, tuple):
            target, source = target[0], source[0]
        if not isinstance(target, torch.Tensor):
            continue
        if target.shape != source.shape:
            target[len(source) :].fill_(padding.get(name, 0))
            target = target[: len(source)]
        target.copy_(source, non_blocking=True)


class MicroBatchGraphs:
    """Runs a model's micro-batches as graphs, one for each layout. Calls have the arguments of
    `forward_backward`, with micro-batches in host memory, and are collective."""

    def __init__(
        self,
        training: CausalLMForTraining,
        world: World,
        make_capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        self._training, self._world, self._make_capture = training, world, make_capture
        self._documents = self._longest = 0
        """Documents of the layouts of packed rows, and what none of them exceeds."""
        self._capacity: DocumentCapacity = ()
        """The capacity of recurrent layers in these."""
        self._inputs: dict[Layout, FixedInputs] = {}
        """Inputs of layouts that have run once."""
        self._captured: dict[Layout, Replay] = {}
        self._capture: Capture | None = None
        self._slope: torch.Tensor | None = None
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        """The gradients that the graphs add to."""
        self.off: str | None = None
        """Why graphs are off; None: they are on."""

    def __call__(self, batch: MicroBatch, slope: torch.Tensor) -> torch.Tensor:
        assert batch.cut is None, "graphs copy no slices of rows"
        layout = None if self.off else self._layout(batch)
        if layout is None:
            return forward_backward(self._training, batch.to(self._world.device), slope)
        has_run = layout in self._inputs
        if not has_run:
            self._inputs[layout] = FixedInputs(batch, layout, self._world.device)
            self.release()  # without a graph it needs the memory that graphs hold
        inputs = self._inputs[layout]
        inputs.fill(batch)
        with self._training.head_loss.equal_rows():
            if has_run and self._ready(layout, inputs, slope):
                assert self._slope is not None
                self._slope.copy_(slope)
                return self._captured[layout]().clone()
            return forward_backward(self._training, inputs.batch, slope)

    def release(self) -> None:
        """Drop the graphs, and free their memory."""
        held = self._capture is not None
        if held and torch.cuda.is_available():
            torch.cuda.synchronize()  # a graph may be running
        self._captured.clear()
        self._gradients.clear()
        self._capture = None
        if held and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _layout(self, batch: MicroBatch) -> Layout | None:
        """Return the layout of a micro-batch; None if it turns graphs off."""
        rows, seq_len = batch.input_ids.shape
        tokens, longest = rows * seq_len, batch.bounds[1]
        keys_unit, trained_unit = padding_units(tokens, self._training.head_loss.chunk_rows())
        documents = len(batch.bounds[0]) - 1
        packed = longest < seq_len or documents != rows
        shared, capacity = batch.shared, list[int]()
        if batch.documents and self._training.recurrent_layers:
            capacity = [*document_capacity(batch.documents.lengths, longest=seq_len)]
        trained, packed_documents, longest, keys, turns, *capacity = largest_of_all(
            [
                max(1, len(batch.positions)),
                documents if packed else 0,
                longest,
                *((len(shared.keys) - tokens, len(shared.copies)) if shared else (0, 0)),
                *capacity,
            ],
            world=self._world,
        )
        trained = _whole_units(trained, trained_unit)
        copies = (_whole_units(keys, keys_unit), turns)
        if not packed_documents:
            return Layout(rows, seq_len, trained, documents, seq_len, copies, ())
        self._reserve(packed_documents, rows, longest, tuple(capacity))
        padded = capacity_tokens(self._capacity, longest=seq_len) if capacity else 0
        if padded > MOST_POSITIONS * tokens:
            self._turn_off("documents of too different lengths for its recurrent layers")
            return None
        most = min(self._longest, seq_len)
        return Layout(rows, seq_len, trained, self._documents, most, copies, self._capacity)

    def _reserve(self, documents: int, rows: int, longest: int, capacity: DocumentCapacity) -> None:
        """Reserve these documents in layouts of packed rows: for at least a quarter more, and of
        the next power of two, with no more long ones than a micro-batch has had. A number equal to
        the rows would mean that each row is one document."""
        documents = max(documents, rows + 1)
        current = self._capacity or (0,) * len(capacity)
        too_few, too_short = documents > self._documents, longest > self._longest
        more_long = any(more > most for more, most in zip(capacity, current, strict=True))
        if too_few or too_short or more_long:
            self.release()  # earlier packed layouts will not come again
            self._inputs = {key: x for key, x in self._inputs.items() if key.documents == rows}
            self._capacity = tuple(map(max, capacity, current))
        if too_few:
            self._documents = documents + max(LEAST_MORE, documents // 4)
        if too_short:
            self._longest = 2 ** (longest - 1).bit_length()

    def _ready(self, layout: Layout, inputs: FixedInputs, slope: torch.Tensor) -> bool:
        """Whether there is a graph of this layout; captures it if not."""
        if layout not in self._captured:
            failure = None
            try:
                self._captured[layout] = self._new_graph(inputs, slope)
            except RuntimeError as error:
                failure = str(first_cause(error)).strip().partition("\n")[0]
            failure = any_of_all(failure, world=self._world)
            if failure is not None:
                abandon_micro_batch_(self._training)
                self._turn_off(failure)
                return False
        assert all(param.grad is grad for param, grad in self._gradients), (
            "a graph would add to gradients that are gone"
        )
        return True

    def _new_graph(self, inputs: FixedInputs, slope: torch.Tensor) -> Replay:
        if self._capture is None:
            self._capture = self._make_capture()
            self._slope = torch.empty_like(slope)
            trained = (p for p in self._training.parameters() if p.requires_grad)
            self._gradients = [(param, param.grad) for param in trained]
        fixed_slope = self._slope
        assert fixed_slope is not None
        with self._training.adapters.afresh():
            return self._capture(
                lambda: forward_backward(self._training, inputs.batch, fixed_slope)
            )

    def _turn_off(self, reason: str) -> None:
        self.release()
        self._inputs.clear()
        self.off = reason
        logger.warning(
            "CUDA graphs are off from here on: a micro-batch cannot be captured (%s)", reason
        )


def padding_units(tokens: int, chunk_rows: int) -> tuple[int, int]:
    """Return the multiples to which a layout pads keys of shared prompts, and trained tokens.
    chunk_rows: of the loss."""
    unit = -(-tokens // SIZES)
    return unit, _whole_units(unit, chunk_rows)


def _whole_units(count: int, unit: int) -> int:
    return -(-count // unit) * unit
