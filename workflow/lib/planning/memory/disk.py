"""Bytes on disk of what a run leaves behind, from shapes alone."""

from workflow.lib.model.architecture.model_shape import DecoderLayer, ModelShape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import (
    MOMENT_BLOCK_SIZE,
    layer_tensors,
    trainable_parameters,
)
from workflow.lib.planning.token_counts import TokenCounts


def disk_bytes(
    shape: ModelShape,
    setup: Setup,
    tokens: TokenCounts,
    *,
    keep_checkpoints: int,
    keep_best: bool,
) -> dict[str, int]:
    """Return the bytes of every artifact of a run (headers and JSON are not counted).

    Checkpoints: one more than are kept, because the new one is written before the oldest goes; each
    is the fp32 adapter with modules that are trained whole, and both moments (in fp32, or 8 bits
    with their scales). The adapter lies there twice: sharded, and as PEFT's file. The best adapters
    are counted with it: one for every checkpoint that a run may continue from, and the newest.
    """

    def quantized(layer: DecoderLayer) -> int:
        tensors = layer_tensors(layer, setup).by_term
        packed = tensors["nf4_weights"] + tensors["nf4_scales"]
        return sum(rows * width for rows, width in packed)

    adapter = 4 * trainable_parameters(shape, setup)
    eight = setup.optimizer.endswith("8bit")
    moments = adapter // 2 + 2 * adapter // MOMENT_BLOCK_SIZE if eight else 2 * adapter
    packed_tokens = tokens.packed_rows * tokens.seq_len
    return {
        "tokens": packed_tokens * (4 + 1 + 4) + tokens.heldout_tokens * (4 + 1),
        "base": shape.total(quantized) + shape.source_bytes * shape.plain_weights,
        "checkpoints": (adapter + moments) * (keep_checkpoints + 1),
        "adapter": (2 + (keep_checkpoints + 1 if keep_best else 0)) * adapter,
    }
