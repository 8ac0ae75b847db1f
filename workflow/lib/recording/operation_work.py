"""One operation's work on the recorded GPU: FLOP, bytes read and written, a call."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from workflow.lib.kernels.attention.answer_rows import are_equal
from workflow.lib.kernels.attention.arguments import attention_flop
from workflow.lib.kernels.attention.document_attention import NARROW_HEAD
from workflow.lib.kernels.attention.flex_masks import RECORDED_LENGTHS, seen_keys
from workflow.lib.kernels.kernel_launch import LAUNCHED
from workflow.lib.planning import work
from workflow.lib.planning.work import Amount
from workflow.lib.recording.known_results import VIEWS, tensors
from workflow.lib.system.device_types import RECORDED

aten = torch.ops.aten
MAKE_NOTHING = frozenset(
    {
        *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty),
        *(aten.new_empty_strided, aten._unsafe_view, aten.lift_fresh, aten.squeeze),
        *(aten.scalar_tensor, aten._local_scalar_dense, aten.set_, aten.resize_),
    }
)
# The place of the first factor among the arguments.
MATMULS = {
    aten.mm: 0, aten.bmm: 0, aten._scaled_mm: 0, aten._grouped_mm: 0,
    aten.addmm: 1, aten.addmm_: 1, aten.baddbmm: 1,
}  # fmt: skip
COPIES = frozenset({aten.copy_, aten._to_copy, aten._foreach_copy_})
BACKWARD_FLOP = 2.5  # of forward's: FlashAttention-2, arXiv 2307.08691, sec. 4.1
MASKED = {
    aten._scaled_dot_product_efficient_attention: (0, 1.0),
    aten._scaled_dot_product_efficient_attention_backward: (1, BACKWARD_FLOP),
}
"""The position of the queries, and the FLOP of forward's."""
UNMASKED = {
    aten._scaled_dot_product_flash_attention: (0, 1.0),
    aten._scaled_dot_product_flash_attention_backward: (1, BACKWARD_FLOP),
}
LOOK_UPS = frozenset({aten.embedding, aten.index_select, aten.gather, aten.index})
WRITES = frozenset({aten.fill_, aten.zero_})
CUDNN_HEAD = 128  # the widest head with gradients in cuDNN
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
KERNELS = {
    "experts": work.GROUPED,
    "flex_attention": work.FLEX,
    "document_attention": work.SHORT,
    "delta_rule": work.DELTA_RULE,
    "state_space": work.STATE_SPACE,
}
"""Kinds of kernels with matmuls, by their modules."""


def work_of(func: Any, args: Sequence[Any], options: Any, result: Any) -> tuple[str, Amount] | None:
    """Return the kind of an operation and its work; None if it does nothing on the device."""
    packet = func.overloadpacket
    if func in VIEWS or packet in MAKE_NOTHING or func.namespace == "profiler":
        return None
    if func is LAUNCHED:
        return _kernel_work(*args)
    if func.namespace == "c10d":
        return _collective_work(func, args)
    if packet in COPIES:
        return _copy_work(packet, args, result)
    operands, made = (
        _device_tensors([args, {x: options[x] for x in options if x != "out"}]),
        _device_tensors(result),
    )
    if packet in MATMULS:
        position = MATMULS[packet]
        return _matmul_work(args[position], args[position + 1], made[0], adds=position)
    moved = _bytes(operands) + _bytes(made)
    if func.namespace == "torch_attn":
        return _attention_work(func, args, moved)
    if packet in MASKED:
        position, factor = MASKED[packet]
        query, key, value = args[position : position + 3]
        flop = factor * attention_flop(query, value, keys=key.shape[2])
        return _intense(work.MASKED, Amount(flop, moved, 1))
    if packet in UNMASKED:
        position, factor = UNMASKED[packet]
        query, key, value = args[position : position + 3]
        seen = seen_keys(key.shape[2], None) if any(x is True for x in args) else key.shape[2]
        return _flash_work(query, value, moved, factor=factor, keys=seen, alike=True)
    if packet in LOOK_UPS:
        moved = 2 * _bytes(made)
    elif packet in WRITES:
        moved = _bytes(made)
    return _moving(work.MEMORY, moved)


def _device_tensors(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors(tree) if tensor.device.type == RECORDED]


def _bytes(moved: Sequence[torch.Tensor]) -> float:
    """Return the bytes of tensors, each once; of an expanded one its stored ones."""
    sizes: dict[tuple[int, int, torch.Size], int] = {
        (storage._cdata, int(x.storage_offset()), x.shape): min(x.nbytes, storage.nbytes())
        for x in moved
        for storage in [x.untyped_storage()]
    }
    return float(sum(sizes.values()))


def _intense(kind: str, amount: Amount) -> tuple[str, Amount]:
    """Return a kind with the logarithm of its FLOP a byte."""
    if not amount.flop or not amount.bytes:
        return kind, amount
    return f"{kind}@{round(math.log2(amount.flop / amount.bytes))}", amount


def _moving(kind: str, moved: float) -> tuple[str, Amount] | None:
    """Return a kind and its amount; None without any bytes."""
    return (kind, Amount(0.0, moved, 1)) if moved else None


def _matmul_work(
    left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, *, adds: int
) -> tuple[str, Amount]:
    kind = work.MATMUL
    if left.dtype in EIGHT_BITS:
        kind = work.MATMUL_8
    elif left.dtype == torch.float32:
        kind = work.MATMUL_32
    flop = 2.0 * product.numel() * left.shape[-1]
    moved = _bytes([left, right]) + (1 + adds) * _bytes([product])
    return _intense(kind, Amount(flop, moved, 1))


def _kernel_work(moved: list[torch.Tensor], kernel: str, flop: float) -> tuple[str, Amount] | None:
    if "decode" in kernel or "dequantize" in kernel:  # perhaps a slice of the packed weights
        return _moving(work.DECODE, moved[0].nbytes + moved[0].numel() / 2)
    total = _bytes(_device_tensors(moved))
    if not flop:
        return _moving(work.MEMORY, total)
    kind = KERNELS[kernel.partition(".")[0]]
    if kind == work.GROUPED and moved[1].dtype in EIGHT_BITS:
        kind = work.GROUPED_8
    if kind == work.SHORT and moved[0].shape[-1] > NARROW_HEAD:
        kind = work.WIDE
    return _intense(kind, Amount(flop, total, 1))


def _attention_work(func: Any, args: Sequence[Any], moved: float) -> tuple[str, Amount]:
    """Of FlashAttention over documents. Those of one length, with no window, may be cuDNN's."""
    named = dict(zip((x.name for x in func._schema.arguments), args, strict=False))
    query, window, longest = named["query"], (named.get("window_size") or [-1])[0], named["max_q"]
    alike = window < 0 and (len(named["cu_seq_q"]) - 1) * longest == len(query)
    factor = BACKWARD_FLOP if "grad_out" in named else 1.0
    alike = alike and are_equal(RECORDED_LENGTHS.get())
    seen = seen_keys(longest, window + 1)
    return _flash_work(query, named["value"], moved, factor=factor, keys=seen, alike=alike)


def _flash_work(
    query: torch.Tensor,
    value: torch.Tensor,
    moved: float,
    *,
    factor: float,
    keys: float,
    alike: bool,
) -> tuple[str, Amount]:
    """Work by FlashAttention, or by cuDNN for documents of one length (alike)."""
    kind = work.EQUAL if alike else work.ATTENTION
    if query.shape[-1] > CUDNN_HEAD:
        kind = work.BROAD
    return _intense(kind, Amount(factor * attention_flop(query, value, keys=keys), moved, 1))


def _collective_work(func: Any, args: Sequence[Any]) -> tuple[str, Amount] | None:
    group = next((x for x in args if isinstance(x, torch.ScriptObject)), None)
    if group is None:
        return None
    ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
    whole = max((x.nbytes for x in tensors([*args])), default=0)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    gathers = "gather" in func.__name__
    times = 2.0 if "allreduce" in func.__name__ else 1.0
    kind = work.GATHER if gathers else work.REDUCE
    return f"{kind}/{len(ranks)}/{stride}", Amount(0.0, times * whole, 1)


def _copy_work(packet: Any, args: Sequence[Any], result: Any) -> tuple[str, Amount] | None:
    """Work of a copy on the device, to the host or from it."""
    every = [*tensors([*args])]
    into = [*tensors(result)] if packet is aten._to_copy else every[: (len(every) + 1) // 2]
    out_of = every if packet is aten._to_copy else every[len(into) :]
    written, read = _device_tensors(into), _device_tensors(out_of)
    if bool(written) == bool(read):
        return _moving(work.MEMORY, _bytes(written) + _bytes(read))
    num_moved = max((x.numel() for x in (out_of if written else into)), default=1)
    if num_moved <= 1:  # a number that the host knows
        return _moving(work.MEMORY, _bytes(written or read))
    kind = work.FROM_HOST if written else work.TO_HOST
    return kind, Amount(0.0, _bytes(written or read), 1)
