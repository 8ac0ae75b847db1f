"""Prompts that are computed once for both documents of a pair.

A row holds [prompt chosen | last token of the prompt, rejected]. The positions of the second
document continue the prompt's: a document whose first position is p > 0 sees the first p tokens of
the document before it, besides its own. Every token has the same hidden state as in whole
documents. FlashAttention gets the keys of [prompt chosen | prompt rejected], gathered, and aligns
queries and keys at the ends of documents; other implementations get a mask."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from workflow.lib.kernels.attention.flex_masks import MaskKind

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SharedPrompts:
    """The keys of T tokens in flattened rows. keys: (K,), the token of each; own: (T,), each
    token's key in its own document; prompt: (S,), tokens that a second document sees too; copies:
    (S,), their keys there; all int64. bounds: (documents + 1,) int32 of keys; longest: most keys of
    a document."""

    keys: torch.Tensor
    own: torch.Tensor
    prompt: torch.Tensor
    copies: torch.Tensor
    bounds: torch.Tensor
    longest: int

    @classmethod
    def of(cls, position_ids: Numbers) -> Self | None:
        """Return the keys of rows (rows, tokens) in host memory; None without a shared prompt."""
        flat, starts = position_ids.reshape(-1), np.flatnonzero(document_starts(position_ids))
        seen = flat[starts]  # tokens of the document before
        if not seen.any():
            return None
        second = np.flatnonzero(seen)
        assert not seen[second - 1].any(), "a prompt is shared by two documents"
        sizes = np.diff(starts, append=flat.size)
        bounds = np.concatenate([[0], np.cumsum(sizes + seen)])
        own = np.arange(flat.size) + np.repeat(np.cumsum(seen), sizes)
        prompt, copies = (
            np.concatenate([first[n] + np.arange(seen[n + late]) for n in second - late])
            for first, late in ((starts, 1), (bounds, 0))
        )
        keys = np.empty(bounds[-1], dtype=np.int64)
        keys[own], keys[copies] = np.arange(flat.size), prompt
        k, o, p, c, b = map(torch.from_numpy, (keys, own, prompt, copies, bounds.astype(np.int32)))
        return cls(k, o, p, c, b, int((sizes + seen).max()))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "SharedPrompts":
        """Return the same with `change` applied to its tensors."""
        named = {n: x for n, x in vars(self).items() if isinstance(x, torch.Tensor)}
        changed = {name: change(tensor) for name, tensor in named.items()}
        return replace(self, **changed)  # type: ignore[arg-type]

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the keys or values (K, heads, width) from the tokens' (T, heads, width)."""
        keys: torch.Tensor = _Gathered.apply(x, self)  # type: ignore[no-untyped-call]
        return keys


class _Gathered(torch.autograd.Function):
    """Backward adds at most two numbers, so their order does not matter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shared: SharedPrompts) -> torch.Tensor:
        ctx.shared = shared
        return x.index_select(0, shared.keys)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        shared, (grad,) = ctx.shared, grads
        grad_tokens = grad.index_select(0, shared.own)
        grad_tokens.index_add_(0, shared.prompt, grad.index_select(0, shared.copies))
        return grad_tokens, None


def document_starts(position_ids: Any) -> Any:
    """Return where documents start (rows, tokens) bool, of an array or a tensor of positions."""
    starts = position_ids == 0
    starts[:, 1:] |= position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts


def kept_tokens(
    input_ids: npt.NDArray[Any], position_ids: npt.NDArray[Any], loss_mask: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return which tokens of rows (rows, seq_len) are kept when the two documents of every example
    share their common tokens before a trained one. Padding is not kept."""
    kept = np.ones(position_ids.shape, dtype=np.bool_)
    for ids, positions, trained, left in zip(input_ids, position_ids, loss_mask, kept, strict=True):
        starts = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
        for first, second, end in zip(starts[::2], starts[1::2], starts[2::2], strict=False):
            one, other = slice(first, second), slice(second, end)
            length = _common(ids[one], ids[other], trained[one], trained[other])
            left[second : second + max(0, length - 1)] = False
        if len(starts) % 2 == 0:
            left[starts[-2] :] = False
    return kept


def _common(one: npt.NDArray[Any], other: npt.NDArray[Any], *trained: npt.NDArray[np.bool_]) -> int:
    """Return how many first tokens two documents have in common, before a trained one."""
    length = min(len(one), len(other))
    ends = [one[:length] != other[:length], *(mask[:length] for mask in trained)]
    return min((int(end.argmax()) for end in ends if end.any()), default=length)


def prompt_mask(position_ids: torch.Tensor, kind: MaskKind) -> torch.Tensor:
    """Return which keys each query sees (rows, 1, tokens, tokens) bool."""
    positions = torch.arange(position_ids.shape[1], device=position_ids.device)
    starts = document_starts(position_ids)
    number = starts.cumsum(dim=1)
    begins = torch.where(starts, positions, 0).cummax(dim=1).values
    prompt_length = position_ids.gather(1, begins)  # tokens of the document before
    query, key = position_ids[:, :, None], position_ids[:, None, :]
    before = number[:, :, None] - number[:, None, :]
    seen: torch.Tensor = (before == 0) | ((before == 1) & (key < prompt_length[:, :, None]))
    seen &= key <= query
    if kind.window is not None:
        seen &= query - key < kind.window
    if kind.chunk is not None:
        seen &= query // kind.chunk == key // kind.chunk
    return seen[:, None]
