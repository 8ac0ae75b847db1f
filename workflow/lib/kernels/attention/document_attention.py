"""Causal attention within documents by the project's GPU kernels, for short documents and for heads
wider than FlashAttention's (256), for which torch has only a slow kernel without documents.

FlashAttention 2 gives every document tiles of its own, as many as the longest one has, and pads
each to 128 tokens. Here a tile has neighbouring tokens of any documents. Forward and backward of
16,384 tokens, 32 heads of 128 and 8 of keys, took 0.21 of its time on chats of 49 tokens (at most
2,048), 0.63 for documents of 256 tokens, 0.82 of 1,024 and 0.88 of 2,000 (H200, 2026-11-30).

Scores are never stored (as in FlashAttention 2, arXiv 2307.08691). Softmax is computed in fp32,
matmuls in the queries' dtype with fp32 sums. Backward computes the scores twice: for the gradients
of queries, and of keys and values. So no two programs add to the same sum, and every run gives the
same bits."""

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from workflow.lib.kernels.attention.arguments import attention_flop
from workflow.lib.kernels.attention.attention_choice import WIDEST_HEAD, WIDEST_KERNEL_HEAD
from workflow.lib.kernels.attention.flex_masks import seen_keys
from workflow.lib.kernels.attention.head_groups import Kernels, by_head_groups
from workflow.lib.kernels.kernel_launch import launch, power_of_two
from workflow.lib.kernels.op import Case, Op, drawn

CASE_BOUNDS = (0, 70, 200)  # of documents
LOG2_E = math.log2(math.e)  # the kernels take powers of two


class Tile(NamedTuple):
    """The size of a program: its tokens, and the tokens of one pass of its loop."""

    rows: int
    columns: int
    warps: int
    stages: int = 1  # 2 need less shared memory where one tile is an operand of two matmuls


SHORT_DOCUMENT = 1024  # tokens, on average, up to which these kernels take heads of FlashAttention
# Triton 3.6 compiles matmuls of fewer columns wrongly on Hopper (docs/log.md).
NARROWEST_HEAD = 64
NARROW_HEAD = 128
NARROW_TILE = Tile(64, 32, 4, 3)
"""Of heads up to `NARROW_HEAD`: the fastest of 8 tried on an H200, or within 5% of it. Its operands
are 80 KiB, so GPUs with 99 KiB of shared memory have room."""
KEY_GRADIENT_TILE = Tile(16, 32, 4, 2)
TILES = {
    200: {
        "attention": Tile(64, 64, 8),
        "attention_of_queries": Tile(64, 32, 8),
        "attention_of_keys": KEY_GRADIENT_TILE,
    },
    150: {
        "attention": Tile(64, 32, 8, 2),
        "attention_of_queries": Tile(32, 32, 4, 2),
        "attention_of_keys": KEY_GRADIENT_TILE,
    },
    0: {
        "attention": Tile(32, 32, 4, 2),
        "attention_of_queries": Tile(32, 16, 4, 2),
        "attention_of_keys": KEY_GRADIENT_TILE,
    },
}
"""By the least KiB of shared memory of a program. The first are the fastest of 10 to 13 tried on an
H100. The others fit an A100 (163 KiB), and GPUs with 99."""
MATMULS = {"attention": 2, "attention_of_queries": 3, "attention_of_keys": 4}
"""Matmuls of each tile."""
PRODUCT_ROWS, PRODUCT_WARPS = 16, 4  # of a program of `attention_products`


class Seen(NamedTuple):
    """Keys that queries see with documents and windows: a query those from its `first` (tokens,) to
    itself, so queries before its `last` (tokens,) see a key; int32."""

    first: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, bounds: torch.Tensor, tokens: int, window: int | None) -> "Seen":
        """bounds: of documents (documents + 1,), the last may repeat; window: most keys of a query,
        itself included."""
        positions = torch.arange(tokens, dtype=torch.int32, device=bounds.device)
        after = torch.bucketize(positions, bounds, right=True)
        first, last = bounds[after - 1], bounds[after]
        if window is not None:
            first = torch.maximum(first, positions - (window - 1))
            last = torch.minimum(last, positions + window)
        return cls(first, last)


def by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: Seen, scale: float
) -> torch.Tensor:
    """Return the kernels' result from all scores."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    positions = torch.arange(query.shape[0], device=query.device)
    mask = (positions >= seen.first[:, None]) & (positions <= positions[:, None])
    shares = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", shares, value)


def document_kernels(
    bounds: torch.Tensor,
    tokens: int,
    *,
    scale: float | None,
    window: int | None,
    longest: int | None = None,
) -> Kernels:
    """Return causal attention within documents, heads (tokens, heads, width) and (tokens, key
    heads, width), if the kernels are `usable`. bounds, window: as in `Seen.of`; longest: tokens of
    the longest document, for recordings. scale: of scores, by default width^-0.5."""
    return _kernels(Seen.of(bounds, tokens, window), scale, seen_keys(longest or tokens, window))


def _kernels(seen: Seen, scale: float | None, keys: float = 0.0) -> Kernels:
    """keys: computed for a query on average, for recordings."""
    return Kernels(
        partial(forward, seen=seen, scale=scale, keys=keys),
        partial(backward, seen=seen, scale=scale, keys=keys),
        sums_dim=0,
    )


def _by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: Seen, scale: float
) -> torch.Tensor:
    return by_head_groups(_kernels(seen, scale), query, key, value, groups=1)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seen: Seen,
    scale: float | None,
    keys: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the base-2 logarithm of each query's sum (heads, tokens) fp32."""
    call = _Call.of((query, key, value), seen, scale, keys)
    output = query.new_empty(query.shape)
    log_sums = query.new_empty(call.heads, call.tokens, dtype=torch.float32)
    call.launch("attention", call.heads, output, log_sums, *call.inputs, seen.first, *call.strides)
    return output, log_sums


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    *,
    seen: Seen,
    scale: float | None,
    keys: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, contiguous, for `grad` of the output."""
    call = _Call.of((query, key, value), seen, scale, keys)
    grad, output = grad.contiguous(), output.contiguous()
    sums = torch.empty_like(log_sums)
    call.sum_products(sums, grad, output)
    grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in call.inputs)
    inputs = (grad, log_sums, sums, *call.inputs, seen.first)
    call.launch(
        "attention_of_queries", call.heads, grad_query, *inputs, *call.strides, factor=call.scale
    )
    call.launch(
        "attention_of_keys", call.groups, grad_key, grad_value, *inputs, seen.last, *call.strides,
        factor=call.scale,
    )  # fmt: skip
    return grad_query, grad_key, grad_value


class _Call(NamedTuple):
    """The inputs of one call, and their strides."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    scale: float
    keys: float

    @classmethod
    def of(
        cls, inputs: Sequence[torch.Tensor], seen: Seen, scale: float | None, keys: float
    ) -> "_Call":
        query, key, value = inputs
        scale = query.shape[2] ** -0.5 if scale is None else scale
        assert all(x.stride(2) == 1 for x in (query, key, value)), "columns are read side by side"
        assert query.shape[0] == len(seen.first) == key.shape[0], "as many keys as queries"
        return cls((query, key, value), scale, keys)

    @property
    def tokens(self) -> int:
        return self.inputs[0].shape[0]

    @property
    def heads(self) -> int:
        return self.inputs[0].shape[1]

    @property
    def groups(self) -> int:
        """Heads of keys."""
        return self.inputs[1].shape[1]

    @property
    def strides(self) -> list[int]:
        """Of tokens and heads of query, key and value."""
        return [stride for x in self.inputs for stride in x.stride()[:2]]

    @property
    def _widths(self) -> dict[str, int]:
        dim = self.inputs[0].shape[2]
        return {"dim": dim, "width": power_of_two(dim)}

    def launch(
        self, name: str, heads: int, *arguments: torch.Tensor | int, **numbers: float
    ) -> None:
        """Start a kernel for all tiles of this many heads."""
        tile = _tile(self.inputs[0], name)
        out, *inputs = arguments
        assert isinstance(out, torch.Tensor)
        launch(
            f"document_attention.{name}", (-(-self.tokens // tile.rows), heads), out, *inputs,
            self.tokens, self.heads, self.heads // self.groups, self.scale * LOG2_E, **numbers,
            **self._widths, rows=tile.rows, columns=tile.columns, num_warps=tile.warps,
            num_stages=tile.stages,
            flop=MATMULS[name] / 2 * attention_flop(*self.inputs[::2], keys=self.keys),
        )  # fmt: skip

    def sum_products(self, sums: torch.Tensor, grad: torch.Tensor, output: torch.Tensor) -> None:
        """Fill sums (heads, tokens) with the sum over each head of output times gradient."""
        launch(
            "document_attention.attention_products", (-(-self.tokens // PRODUCT_ROWS), self.heads),
            sums, grad, output, self.tokens, self.heads, **self._widths,
            rows=PRODUCT_ROWS, num_warps=PRODUCT_WARPS,
        )  # fmt: skip


def _tile(query: torch.Tensor, name: str) -> Tile:
    narrow = query.shape[2] <= NARROW_HEAD
    return NARROW_TILE if narrow else _tiles(query.device)[name]


@functools.cache
def _tiles(device: torch.device) -> dict[str, Tile]:
    if device.type != "cuda":  # Triton's interpreter, or a recorded device
        return TILES[0]
    properties: Any = torch.cuda.get_device_properties(device)  # whose stubs lack some
    memory = properties.shared_memory_per_block_optin
    return next(tiles for least, tiles in TILES.items() if memory >= least * 1024)


def _case(device: torch.device, dtype: torch.dtype, width: int) -> Case:
    tokens = CASE_BOUNDS[-1]
    leaves = drawn(device, dtype, *((tokens, heads, width) for heads in (2, 1, 1)))
    bounds = torch.tensor(CASE_BOUNDS, dtype=torch.int32, device=device)
    return *(x.requires_grad_() for x in leaves), Seen.of(bounds, tokens, None), width**-0.5


_attention = Op(
    "attention within documents",
    reference=by_torch,
    kernel=_by_kernel,
    case=_case,
    variant=lambda query, *_: (query.dtype, query.shape[2]),
)


def takes_documents(query: torch.Tensor, documents: int, *, alike: bool) -> bool:
    """Whether these kernels attend over queries (tokens, heads, width) of so many documents: by
    heads that FlashAttention lacks, and over short documents, where they are faster. alike: all
    have one length, which cuDNN may serve."""
    tokens, _, width = query.shape
    if width > WIDEST_HEAD:
        return True
    served = NARROWEST_HEAD <= width <= NARROW_HEAD and not alike
    short = tokens <= documents * SHORT_DOCUMENT
    return served and short and usable(query.device, query.dtype, width)


def usable(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernels can attend by heads of this width."""
    return width <= WIDEST_KERNEL_HEAD and _attention.works_on(device, dtype, width)
