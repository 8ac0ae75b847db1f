"""The tensors of one decoder layer, and what they take on a process: cut, and gathered.

FSDP2 cuts dim 0 of every tensor in P parts of ceil(rows / P) rows; the CUDA allocator rounds to 512
bytes.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from workflow.lib.model.architecture.model_shape import Linear

ROUNDING = 512  # bytes; c10/cuda/CUDACachingAllocator, kMinBlockSize
NESTED_BLOCK_SIZE = 256  # bitsandbytes' block of the second quantization (functional.quantize_4bit)

Tensor = tuple[int, int]  # rows, bytes of a row


def rounded(num_bytes: int) -> int:
    """Return the bytes that the allocator gives for so many."""
    return -(-num_bytes // ROUNDING) * ROUNDING


def sharded_bytes(tensors: Iterable[Tensor], *, processes: int) -> int:
    """Bytes of the largest shard of tensors that FSDP2 cuts along dim 0: ceil(rows / P) rows of
    each.
    """
    return sum(rounded(-(-rows // processes) * width) for rows, width in tensors)


def gathered_bytes(tensors: Iterable[Tensor], *, processes: int) -> int:
    """Bytes of the same tensors gathered, with the padding that makes the shards equal; 0 for one
    process.
    """
    if processes == 1:
        return 0
    return sum(rounded(-(-rows // processes) * processes * width) for rows, width in tensors)


@dataclass(frozen=True)
class LayerKind:
    """All that the tensors of a decoder layer depend on."""

    linears: tuple[Linear, ...]
    vectors: tuple[int, ...]
    """Elements of norms and biases."""
    tensors: tuple[tuple[int, ...], ...]
    """Shapes of what else stays in the compute type: routers, convolutions."""
    masters: tuple[tuple[int, ...], ...]
    """Shapes of what is trained whole, in fp32: parts of routers."""
    adapters: tuple[tuple[str, int], ...]
    """Names of the linears that have adapters, and their ranks."""
    dora: bool
    block_size: int
    double_quant: bool
    compute_bytes: int
    processes: int
    """P: those that share the layer."""


class LayerTensors:
    """Tensors of one decoder layer by term; NF4 data are 1-D float32 views of bytes."""

    def __init__(self, kind: LayerKind) -> None:
        scales = [tensor for linear in kind.linears for tensor in _scales(linear, kind)]
        self.by_term: dict[str, list[Tensor]] = {
            "nf4_weights": [_view(math.ceil(x.num_weights / 2)) for x in kind.linears],
            "nf4_scales": scales,
            "norms_and_biases": [
                *((n, kind.compute_bytes) for n in kind.vectors),
                *((n, kind.compute_bytes * math.prod(rest)) for n, *rest in kind.tensors),
            ],
            "lora_weights": [
                *_adapters(kind),
                *((n, 4 * math.prod(rest)) for n, *rest in kind.masters),
            ],
        }
        p = kind.processes
        self.sharded = {t: sharded_bytes(x, processes=p) for t, x in self.by_term.items()}
        self.gathered = {t: gathered_bytes(x, processes=p) for t, x in self.by_term.items()}
        packed = self.by_term["nf4_weights"] + self.by_term["nf4_scales"]
        self.packed_slice = rounded(math.ceil(sharded_bytes(packed, processes=1) / p))
        self.gradients = 2 * self.gathered["lora_weights"]
        """Bytes of what backward makes of all masters, and of the input of its reduction, fp32."""
        if not kind.dora:  # `fsdp`: masters are gathered in the compute type
            masters = self.by_term["lora_weights"]
            cast = [(rows, width // 4 * kind.compute_bytes) for rows, width in masters]
            self.gathered["lora_weights"] = gathered_bytes(cast, processes=p)


# A search of plans asks thousands of times for the same few kinds.
layer_tensors_of = functools.lru_cache(maxsize=64)(LayerTensors)


def _adapters(kind: LayerKind) -> list[Tensor]:
    """A (r, in_features), B (out_features, r) and DoRA's magnitudes (out_features,), fp32; of a
    stack A (experts x r, in_features) and B (out_features of an expert, r x experts).
    """
    ranks, tensors = dict(kind.adapters), []
    for linear in kind.linears:
        if rank := ranks.get(linear.name):
            (experts, width), (rows, _) = linear.adapter_shapes
            tensors += [(experts * rank, 4 * width), (rows, 4 * rank * experts)]
            tensors += [(linear.out_features, 4)] if kind.dora else []
    return tensors


def _view(num_bytes: int) -> Tensor:
    return math.ceil(num_bytes / 4), 4


def _scales(linear: Linear, kind: LayerKind) -> list[Tensor]:
    """absmax: fp32 per block; or with double quantization 8 bits per block, and fp32 per 256
    blocks.
    """
    blocks = math.ceil(linear.num_weights / kind.block_size)
    if not kind.double_quant:
        return [(blocks, 4)]
    return [_view(blocks), (math.ceil(blocks / NESTED_BLOCK_SIZE), 4)]
