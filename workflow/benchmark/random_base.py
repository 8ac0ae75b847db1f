"""A base of any shape with random weights, and random rows, for measurements of speed and
memory.

All linears of one size share one random tensor, so 70B parameters are quantized in seconds, on the
CPU. Each is stored separately, so that loading reads as many bytes as of a real model."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.model.adaptable_linears import weight_shapes
from workflow.lib.model.nf4_model import stored_buffers
from workflow.lib.quantization.nf4_checkpoint import (
    SHARD_BYTES,
    BaseWeights,
    ShardWriter,
    base_config,
    quantize_tensor,
)
from workflow.lib.quantization.nf4_codes import quantize_expert, stack_tensors
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.files import new_folder, write_json

DEVIATION = 0.02  # of the weights: most families' initialization
SEED = 0
DRAWN = 2**24
DISTINCT_EXPERTS = 8  # of a stack: the others repeat them


def write_random_base(
    folder: Path, config: dict[str, Any], settings: QuantizeConfig, *, float_storage: bool = False
) -> None:
    """Write a base of the shape of `config` to `folder`, which appears as a whole.
    float_storage: packed weights as bf16 views, which other software needs for sharding."""
    with new_folder(folder) as partial:
        write_json(partial / "config.json", config)
        model = Checkpoint(partial).model
        weights = BaseWeights.of(model, settings)
        draw = torch.Generator().manual_seed(SEED)
        tensors: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
        writer = ShardWriter(partial, shard_bytes=SHARD_BYTES)
        packed = {*weights.linears, *weights.stacks}
        for path, size in weight_shapes(model).items():
            if path not in packed:
                continue
            if size not in tensors:
                tensors[size] = _packed(size, draw, settings)
                if float_storage:
                    tensors[size]["weight"] = as_bfloat16(tensors[size]["weight"])
            writer.add({f"{path}.{suffix}": part.clone() for suffix, part in tensors[size].items()})
        for name, param in (*model.named_parameters(), *stored_buffers(model)):
            if packed.isdisjoint((name, name.removesuffix(".weight"))):
                value = _random(tuple(param.shape), draw)
                value = torch.ones_like(value) if param.ndim == 1 else value
                writer.add({name: value})
        writer.close()
        written = base_config(config, settings, weights)
        if float_storage and packed:
            written["quantization_config"]["bnb_4bit_quant_storage"] = "bfloat16"
        write_json(partial / "config.json", written)


def _packed(
    size: tuple[int, ...], draw: torch.Generator, settings: QuantizeConfig
) -> dict[str, torch.Tensor]:
    """Return the checkpoint tensors of a random linear (out, in), or stack (experts, out, in)."""
    if len(size) == 2:
        return quantize_tensor(_random(size, draw), settings, device=torch.device("cpu"))
    weights = [_random(size[1:], draw) for _ in range(min(size[0], DISTINCT_EXPERTS))]
    distinct = [quantize_expert(weight, settings) for weight in weights]
    experts = [distinct[number % len(distinct)] for number in range(size[0])]
    return stack_tensors(experts, settings, shape=weights[0].shape, dtype=weights[0].dtype)


def _random(size: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """Draw at most `DRAWN` values and repeat them: a billion would take too long."""
    count = math.prod(size)
    values = torch.randn(min(count, DRAWN), dtype=torch.bfloat16, generator=draw) * DEVIATION
    return values.repeat(-(-count // DRAWN))[:count].reshape(size)


def as_bfloat16(packed: torch.Tensor) -> torch.Tensor:
    """Return packed weights (bytes, 1) uint8 as the same bytes (bytes / 2, 1) in bf16."""
    return packed.reshape(-1).view(torch.bfloat16).reshape(-1, 1)


def random_rows(*, rows: int, seq_len: int, documents: int, vocab_size: int) -> TokenStore:
    """Return `rows` full rows of `documents` documents, trained except their first tokens."""
    ids = np.random.default_rng(SEED).integers(0, vocab_size, (rows, seq_len)).astype(np.uint32)
    positions = np.tile(np.arange(seq_len, dtype=np.int32), (rows, 1)) % (seq_len // documents)
    return TokenStore(
        manifest={},
        arrays={
            "train.input_ids.npy": ids,
            "train.loss_mask.npy": positions > 0,
            "train.position_ids.npy": positions,
            "heldout.input_ids.npy": ids[0],
            "heldout.loss_mask.npy": positions[0] > 0,
            "heldout.offsets.npy": np.array([0, seq_len]),
        },
    )
