"""Prompts that are computed once for all documents of a pair or a group.

A row holds [prompt chosen | last token of the prompt, rejected]. The positions of later documents
continue the prompt's: a document whose first position is p > 0 sees the first p tokens of the last
document that begins at 0, besides its own. Every token has the same hidden state as in whole
documents. FlashAttention gets the keys of [prompt chosen | prompt rejected], gathered, and aligns
queries and keys at the ends of documents; other implementations get a mask."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from workflow.lib.kernels.attention.answer_rows import document_starts
from workflow.lib.kernels.attention.flex_masks import MaskKind

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SharedPrompts:
    """The keys of T tokens in flattened rows. keys: (K,), the token of each; own: (T,), each
    token's key in its own document; copies: (documents, T), its keys in the second document that
    sees it, in the third one, ..., or -1; all int64. bounds: (documents + 1,) int32 of keys;
    longest: most keys of a document."""

    keys: torch.Tensor
    own: torch.Tensor
    copies: torch.Tensor
    bounds: torch.Tensor
    longest: int

    @classmethod
    def of(cls, position_ids: Numbers) -> Self:
        """Return the keys of rows (rows, tokens) in host memory."""
        flat, starts = position_ids.reshape(-1), np.flatnonzero(document_starts(position_ids))
        seen = flat[starts]  # tokens of the prompt
        number = np.arange(len(seen))
        turn = number - np.maximum.accumulate(np.where(seen == 0, number, 0))
        sizes = np.diff(starts, append=flat.size)
        bounds = np.concatenate([[0], np.cumsum(sizes + seen)])
        own = np.arange(flat.size) + np.repeat(np.cumsum(seen), sizes)
        keys, copies = np.empty(bounds[-1], np.int64), np.full((turn.max(), flat.size), -1)
        keys[own] = np.arange(flat.size)
        for n in np.flatnonzero(turn):
            prompt = starts[n - turn[n]] + np.arange(seen[n])
            copies[turn[n] - 1, prompt] = bounds[n] + np.arange(seen[n])
            keys[bounds[n] :][: seen[n]] = prompt
        k, o, c, b = map(torch.from_numpy, (keys, own, copies, bounds.astype(np.int32)))
        return cls(k, o, c, b, int((sizes + seen).max()))

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
    """Backward adds a token's copies in order: atomic additions have a random one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shared: SharedPrompts) -> torch.Tensor:
        ctx.shared = shared
        return x.index_select(0, shared.keys)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        shared, (grad,) = ctx.shared, grads
        dtype = grad.dtype
        if len(shared.copies) > 1:  # two numbers round once in any dtype
            dtype = torch.promote_types(dtype, torch.float32)
        grad_tokens = grad.index_select(0, shared.own).to(dtype)
        for keys in shared.copies:
            copied = grad.index_select(0, keys.clamp(min=0))
            grad_tokens += copied.masked_fill_((keys < 0)[:, None, None], 0.0)
        return grad_tokens.to(grad.dtype), None


def prompt_mask(position_ids: torch.Tensor, kind: MaskKind) -> torch.Tensor:
    """Return which keys each query sees (rows, 1, tokens, tokens) bool."""
    positions = torch.arange(position_ids.shape[1], device=position_ids.device)
    starts = document_starts(position_ids)
    number = starts.cumsum(dim=1)
    begins = torch.where(starts, positions, 0).cummax(dim=1).values
    prompt_length = position_ids.gather(1, begins)
    first = torch.where(position_ids == 0, number, 0).cummax(dim=1).values  # with the prompt
    query, key = position_ids[:, :, None], position_ids[:, None, :]
    prompt_keys = (number[:, None, :] == first[:, :, None]) & (key < prompt_length[:, :, None])
    seen: torch.Tensor = (number[:, :, None] == number[:, None, :]) | prompt_keys
    seen &= key <= query
    if kind.window is not None:
        seen &= query - key < kind.window
    if kind.chunk is not None:
        seen &= query // kind.chunk == key // kind.chunk
    return seen[:, None]
