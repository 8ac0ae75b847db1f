"""Causal attention within documents by the project's GPU kernels, for heads wider than
FlashAttention's (256): Gemma 4 has some of 512, for which torch has only a slow kernel without
documents.

Scores are never stored (as in FlashAttention 2, arXiv 2307.08691). Softmax is computed in fp32,
matmuls in the queries' dtype with fp32 sums. Backward computes the scores twice: for the gradients
of queries, and of keys and values. So no two programs add to the same sum, and every run gives the
same bits."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from workflow.lib.kernels.attention.arguments import attention_flop
from workflow.lib.kernels.attention.attention_choice import WIDEST_KERNEL_HEAD
from workflow.lib.kernels.attention.flex_masks import seen_keys
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
    """Return the result of `wide_attention` from all scores."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    positions = torch.arange(query.shape[0], device=query.device)
    mask = (positions >= seen.first[:, None]) & (positions <= positions[:, None])
    shares = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", shares, value)


def wide_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    *,
    scale: float | None,
    window: int | None,
    longest: int | None = None,
) -> torch.Tensor:
    """Return causal attention (tokens, heads, width) within documents by the kernels, if they are
    `usable`. query: (tokens, heads, width); key, value: (tokens, key heads, width), each serving
    neighbouring heads of queries. bounds, window: as in `Seen.of`; longest: tokens of the longest
    document, for recordings. scale: of scores, by default width^-0.5."""
    tokens, _, width = query.shape
    seen = Seen.of(bounds, tokens, window)
    scale = width**-0.5 if scale is None else scale
    keys = seen_keys(longest or tokens, window)
    return _by_kernel(query, key, value, seen, scale, keys)


def _by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: Seen,
    scale: float,
    keys: float = 0.0,
) -> torch.Tensor:
    """keys: computed for a query on average, for recordings."""
    output: torch.Tensor = _WideAttention.apply(query, key, value, *seen, scale, keys)  # type: ignore[no-untyped-call]
    return output


class _WideAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        first: torch.Tensor,
        last: torch.Tensor,
        scale: float,
        keys: float,
    ) -> torch.Tensor:
        output, log_sums = forward(query, key, value, Seen(first, last), scale, keys)
        ctx.save_for_backward(query, key, value, output, log_sums, first, last)
        ctx.scale, ctx.keys = scale, keys
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, log_sums, *seen = ctx.saved_tensors
        inputs = (grad, query, key, value, output, log_sums, Seen(*seen), ctx.scale, ctx.keys)
        return *backward(*inputs), None, None, None, None


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: Seen,
    scale: float,
    keys: float = 0.0,
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
    seen: Seen,
    scale: float,
    keys: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, contiguous, for `grad` of the output."""
    call = _Call.of((query, key, value), seen, scale, keys)
    grad, output = grad.contiguous(), output.contiguous()
    sums = torch.empty_like(log_sums)
    call.sum_products(sums, grad, output)
    grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in call.inputs)
    inputs = (grad, log_sums, sums, *call.inputs, seen.first)
    call.launch(
        "attention_of_queries", call.heads, grad_query, *inputs, *call.strides, factor=scale
    )
    call.launch(
        "attention_of_keys", call.groups, grad_key, grad_value, *inputs, seen.last, *call.strides,
        factor=scale,
    )  # fmt: skip
    return grad_query, grad_key, grad_value


class _Call(NamedTuple):
    """The inputs of one call, and their strides."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    scale: float
    keys: float

    @classmethod
    def of(cls, inputs: Sequence[torch.Tensor], seen: Seen, scale: float, keys: float) -> "_Call":
        query, key, value = inputs
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
        tile = _tiles(self.inputs[0].device)[name]
        out, *inputs = arguments
        assert isinstance(out, torch.Tensor)
        launch(
            f"wide_attention.{name}", (-(-self.tokens // tile.rows), heads), out, *inputs,
            self.tokens, self.heads, self.heads // self.groups, self.scale * LOG2_E, **numbers,
            **self._widths, rows=tile.rows, columns=tile.columns, num_warps=tile.warps,
            num_stages=tile.stages,
            flop=MATMULS[name] / 2 * attention_flop(*self.inputs[::2], keys=self.keys),
        )  # fmt: skip

    def sum_products(self, sums: torch.Tensor, grad: torch.Tensor, output: torch.Tensor) -> None:
        """Fill sums (heads, tokens) with the sum over each head of output times gradient."""
        launch(
            "wide_attention.attention_products", (-(-self.tokens // PRODUCT_ROWS), self.heads),
            sums, grad, output, self.tokens, self.heads, **self._widths,
            rows=PRODUCT_ROWS, num_warps=PRODUCT_WARPS,
        )  # fmt: skip


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
    "attention with wide heads",
    reference=by_torch,
    kernel=_by_kernel,
    case=_case,
    variant=lambda query, *_: (query.dtype, query.shape[2]),
)


def usable(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernels can attend by heads of this width."""
    return width <= WIDEST_KERNEL_HEAD and _attention.works_on(device, dtype, width)
