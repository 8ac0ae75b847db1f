"""Tokens to score, in rows as training packs them, and scores of a model's logits.

A row passes through a model at once: neighbouring packed rows without their padding, or documents,
concatenated. Documents are whole: rotary embeddings may depend on their length. Positions begin
again with each document, which alone keeps documents apart, as in training."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.tokens.packing import text_lengths
from workflow.lib.data.tokens.token_store import Array, TokenStore
from workflow.lib.distributed.work_sharing import is_sharded, shared_out
from workflow.lib.distributed.world import World
from workflow.lib.kernels.attention.packed import FLATTENED
from workflow.lib.model.layers.adapter_dropout import AdapterState
from workflow.lib.model.prepared_decoder import PreparedDecoder
from workflow.lib.scores.store import Part, Scores
from workflow.lib.system.errors import UserError, setting_error

CHUNK_TOKENS = 1024  # with logits in fp32 at a time: 0.5 GiB at a 128k vocabulary
FLAT_TOKENS = 8192  # of a row for attention by document, for any number of documents


class Row(NamedTuple):
    """One row of n tokens with t trained ones, in host memory."""

    input_ids: torch.Tensor  # (1, n) int64
    position_ids: torch.Tensor  # (1, n) int64, 0 where a document begins
    trained: torch.Tensor
    """(t,) int64, places of the trained tokens, each predicted one place before"""


class Scorer(ABC):
    """A model that scores, on this process or over `world`, whose processes divide the rows."""

    attention: str

    def __init__(
        self, *, device: torch.device, top_k: int, vocabulary: int, world: World | None = None
    ) -> None:
        """top_k, vocabulary: as in `scores_of`."""
        self._device, self._world = device, world
        self._scores_of = partial(scores_of, top_k=top_k, vocabulary=vocabulary)

    @abstractmethod
    def scores(self, rows: Sequence[Row], worked: Callable[[float], None]) -> Scores:
        """Return the scores of the trained tokens of at least one row, in order. worked: gets the
        finished share of the rows' work. Collective."""


def rows_of(tokens: TokenStore, part: Part, *, attention: str) -> list[Row]:
    """Return the rows of a part of the tokens; none without trained tokens."""
    longest = max(tokens.seq_len, FLAT_TOKENS if attention in FLATTENED else 0)
    return list(_joined(_items(tokens, part), longest=longest))


Item = tuple[Array, Array, Array]  # ids, positions and mask of a packed row or a document


def _items(tokens: TokenStore, part: Part) -> Iterator[Item]:
    for number in range(part.first, part.first + part.count):
        if part.split == "train":
            arrays = (tokens.input_ids, tokens.position_ids, tokens.loss_mask)
            ids, positions, mask = (np.asarray(array[number]) for array in arrays)
        else:
            ids, mask = tokens.heldout_documents()[number]
            positions = np.arange(len(ids))
        if mask.any():
            end = int(text_lengths(positions[None], mask[None])[0])
            yield ids[:end], positions[:end], mask[:end]


def _joined(items: Iterable[Item], *, longest: int) -> Iterator[Row]:
    row: list[Item] = []
    for item in items:
        if row and sum(len(ids) for ids, *_ in [*row, item]) > longest:
            yield _row(row)
            row = []
        row.append(item)
    if row:
        yield _row(row)


def _row(items: Sequence[Item]) -> Row:
    ids, positions, mask = (
        torch.from_numpy(np.concatenate(arrays).astype(np.int64))
        for arrays in zip(*items, strict=True)
    )
    return Row(ids[None], positions[None], mask.nonzero().flatten())


@torch.no_grad()
def scores_of(
    logits: torch.Tensor, targets: torch.Tensor, *, top_k: int, vocabulary: int
) -> Scores:
    """Return the scores of targets (n,) by logits (n, vocabulary or more), in fp32 by chunks.
    `rest` includes a teacher's logits beyond the vocabulary."""
    parts = [
        _chunk_scores(chunk.float(), chunk_targets, top_k, vocabulary)
        for chunk, chunk_targets in zip(
            logits.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True
        )
    ]
    return Scores.joined(parts)


def _chunk_scores(
    logits: torch.Tensor, targets: torch.Tensor, top_k: int, vocabulary: int
) -> Scores:
    log_probs = logits.log_softmax(-1)
    target_log_probs = log_probs.gather(1, targets[:, None])[:, 0].cpu().numpy()
    if not top_k:
        return Scores(target_log_probs)
    top, ids = log_probs[:, :vocabulary].topk(top_k)
    # sum the mass of the others: 1 less the likeliest's would be lost in rounding
    other_log_prob = log_probs.scatter(1, ids, float("-inf")).logsumexp(-1)
    return Scores(
        target_log_probs,
        ids.cpu().numpy().astype(np.uint32),
        top.cpu().numpy(),
        other_log_prob.cpu().numpy(),
    )


# Largest logits of one forward. A row with more passes through the model again.
LOGITS_BYTES = 2**32


# Tokens of one forward of several rows, which decodes weights of 4 bits only once.
STACKED_TOKENS = 4096


@dataclass(frozen=True)
class _Pass:
    """A forward of some rows, for some of their trained tokens."""

    rows: Sequence[Row]
    trained: Sequence[torch.Tensor]  # of each row, as in `Row`


class WholeModel(Scorer):
    """A causal LM in evaluation mode, prepared for packed rows."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        """model: changed in place; options: of `Scorer`."""
        super().__init__(**options)
        self._model: Any = model
        self._prepared = PreparedDecoder(model, AdapterState())
        row_bytes = int(model.config.get_text_config().vocab_size) * 4
        self._most = max(1, LOGITS_BYTES // row_bytes)
        self.attention = self._prepared.attention

    def scores(self, rows: Sequence[Row], worked: Callable[[float], None]) -> Scores:
        passes = [*self._passes(rows)]
        own = math.ceil(len(passes) / (1 if self._world is None else self._world.size))

        def compute(mine: list[_Pass]) -> list[Scores]:
            # every forward of a sharded model is collective: all run equal numbers
            idle = passes[:1] * (own - len(mine)) if is_sharded(self._model) else []
            scores = []
            for one in [*mine, *idle]:
                scores.append(self._forward(one))
                worked(1 / own)
            return scores[: len(mine)]

        return Scores.joined(shared_out(passes, compute, world=self._world))

    def _passes(self, rows: Sequence[Row]) -> Iterator[_Pass]:
        """Yield the forwards of rows: several together, a row with many trained tokens again."""
        alone = self.attention in FLATTENED  # its rows are long already
        stack: list[Row] = []
        for row in rows:
            size = (1 + len(stack)) * max(x.input_ids.shape[1] for x in [*stack, row])
            if stack and (alone or size > min(self._most, STACKED_TOKENS)):
                yield from self._stack_passes(stack)
                stack = []
            stack.append(row)
        yield from self._stack_passes(stack)

    def _stack_passes(self, stack: list[Row]) -> Iterator[_Pass]:
        if len(stack) > 1:
            yield _Pass(stack, [row.trained for row in stack])
        else:
            yield from (_Pass([x], [part]) for x in stack for part in x.trained.split(self._most))

    # FSDP gathers into the same buffers in every mode, and inference mode would mark them.
    @torch.no_grad()
    def _forward(self, one: _Pass) -> Scores:
        ids, positions = (x.to(self._device) for x in _stacked(one.rows))
        every = [trained.to(self._device) for trained in one.trained]
        columns = torch.cat(every).sub(1).unique()
        inputs = self._prepared.inputs(ids, positions)
        logits = kept_logits(self._model, columns, **inputs)
        indices = [torch.searchsorted(columns, trained - 1) for trained in every]
        wanted = torch.cat([logits[row, index] for row, index in enumerate(indices)])
        targets = torch.cat([ids[row, trained] for row, trained in enumerate(every)])
        return self._scores_of(wanted, targets)


class HeldoutSums(NamedTuple):
    """Sums over a document's trained tokens: of -log p (nats), their number, and the weighted loss
    by another objective."""

    nll: float
    tokens: int
    objective: float | None = None


def kept_logits(model: Any, columns: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return the logits (rows, columns, vocabulary) at these positions; a class without
    `logits_to_keep` (Qwen's thinkers) makes those of all."""
    logits: torch.Tensor = model(**inputs, logits_to_keep=columns).logits
    return logits if logits.shape[1] == len(columns) else logits[:, columns]


def _stacked(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and positions (rows, longest) int64; a row's padding is one more document."""
    longest = max(row.input_ids.shape[1] for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        length = row.input_ids.shape[1]
        ids[number, :length] = row.input_ids[0]
        positions[number, :length] = row.position_ids[0]
        positions[number, length:] = torch.arange(longest - length)
    return ids, positions


# Words, code, digits, letters of several scripts (one accent composed, one not), signs beyond the
# basic plane, white space.
PROBES = (
    "The quick brown fox doesn't jump over 12345 lazy dogs, does it?",
    "def f(x):\n\treturn {'a': x ** 2, \"b\": [x != 3.14e-7]}\n\n\n    # end",
    "na\u00efve cafe\u0301 Stra\u00dfe \u0394\u03b5\u03bb\u03c4\u03b1 \u043c\u0438\u0440",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093 \uc548\ub155",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f469\u200d\U0001f4bb \t  \r\n \u00a0end ",
)
CHANGE = "Name a model with the tokenizer of model.source"


def check_same_tokenizer(folder: Path, student: Path, *, setting: str, named: str) -> None:
    """Raise `UserError` unless the tokenizers of two model folders have the same tokens and encode
    the same texts alike, special tokens included. setting: the one naming the model in `folder`."""
    own = load_tokenizer(student)
    try:
        other = load_tokenizer(folder)
    except UserError as error:
        reason = f"its tokenizer cannot be compared with that of model.source ({error})"
        raise setting_error(setting, named, reason, CHANGE) from None
    ids, others = own.get_vocab(), other.get_vocab()
    differing = [x for x in sorted({*ids, *others}) if ids.get(x) != others.get(x)]
    if differing:
        first = differing[0]
        reason = (
            f"its tokenizer has other tokens than that of model.source: {len(differing)} differ, "
            f"such as {first!r} ({_shown(others.get(first))} instead of {_shown(ids.get(first))})"
        )
        raise setting_error(setting, named, reason, CHANGE)
    for probe in (*PROBES, "".join(map(str, own.all_special_tokens))):
        if _encoded(own, probe) != _encoded(other, probe):
            reason = f"its tokenizer encodes {probe!r} otherwise than that of model.source"
            raise setting_error(setting, named, reason, CHANGE)


def _shown(number: int | None) -> str:
    return "none" if number is None else f"id {number}"


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    """Return the ids of a text, with and without the special tokens around it."""
    around, alone = (tokenizer(text, add_special_tokens=x).input_ids for x in (True, False))
    return around, alone


def check_top_k(top_k: int, vocabulary: int) -> None:
    """Raise `UserError` if `top_k` exceeds the vocabulary."""
    if top_k > vocabulary:
        raise setting_error(
            "distill.top_k", top_k, f"the vocabulary has {vocabulary} tokens", "Lower it"
        )
