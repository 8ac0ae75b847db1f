"""A whole NF4 base by calibration: rows, layers, what lies outside of layers, and the measurement
of what 4 bits cost.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from workflow.lib.artifacts.quantization_record import CalibrationFacts, HeldoutLosses
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.quantization.calibration import (
    ABSMAX,
    CALIBRATED,
    MODELS,
    ORIGINAL,
    Calibration,
    Hidden,
)
from workflow.lib.quantization.calibration_memory import check_gpu_memory
from workflow.lib.quantization.calibration_rows import calibration_batches, measured_batches
from workflow.lib.quantization.layer_stream import Batch, LayerStream
from workflow.lib.quantization.nf4_checkpoint import SHARD_BYTES, ShardWriter, quantized_tensors
from workflow.lib.quantization.resumable import (
    calibrated_layers,
    layer_errors,
    layer_path,
    remove_state,
)
from workflow.lib.settings.config import QuantizeConfig

logger = logging.getLogger("workflow")


@dataclass(frozen=True)
class CalibrationInputs:
    model: Path
    """Folder of the original model."""
    reader: CheckpointReader
    """Of that folder."""
    store: TokenStore
    linears: dict[str, tuple[int, int]]
    """Path and shape of all linears to quantize."""
    device: torch.device
    dtype: torch.dtype
    """Of activations."""


def write_calibrated(
    folder: Path, inputs: CalibrationInputs, settings: QuantizeConfig, *, fingerprint: str
) -> tuple[int, CalibrationFacts]:
    """Write a calibrated checkpoint's weights to `folder`; return their bytes, and what was
    measured. Continues what is in the folder if it was begun with the same fingerprint."""
    stream = LayerStream(inputs.model, inputs.reader, device=inputs.device, dtype=inputs.dtype)
    heads = stream.eager_heads
    rows = calibration_batches(
        settings, inputs.store, inputs.model, device=inputs.device, eager_heads=heads
    )
    measured = measured_batches(inputs.store, device=inputs.device, eager_heads=heads)
    scores = heads * max(scores_of_a_head(batch) for batch in [*rows, *measured])
    check_gpu_memory(stream.layers, inputs.device, scores=scores)
    tokens = sum(_tokens(batch) for batch in rows)
    logger.info(
        "calibrating %d layers with %d tokens; %d held-out documents show what 4 bits cost",
        len(stream.layers), tokens, len(measured),
    )  # fmt: skip
    calibration = Calibration(stream, rows, measured, settings, linears=inputs.linears)
    hidden = calibrated_layers(calibration, stream, folder, settings, fingerprint=fingerprint)
    linears, stacks = layer_errors(folder, len(stream.layers))
    facts = CalibrationFacts(
        tokens=tokens,
        linears=linears,
        stacks=stacks,
        heldout=_heldout_losses(calibration, hidden),
    )
    total_bytes = _write_files(folder, inputs, settings, stream)
    remove_state(folder)
    return total_bytes, facts


def scores_of_a_head(batch: Batch) -> int:
    num_rows, width = batch.input_ids.shape
    return num_rows * width**2


def _tokens(batch: Batch) -> int:
    return int(batch.input_ids.numel() if batch.counted is None else batch.counted.sum())


def _heldout_losses(calibration: Calibration, hidden: Hidden) -> HeldoutLosses:
    """Return the summed loss (nats) of each held-out document under each model, and how many tokens
    of it are predicted; log the means."""
    measured = calibration.batches[ORIGINAL]
    tokens = [int(batch.counted.sum()) for batch in measured if batch.counted is not None]
    losses = {model: calibration.losses(hidden, model) for model in MODELS}
    if measured:
        mean = {model: sum(losses[model]) / sum(tokens) for model in MODELS}
        logger.info(
            "held-out loss of the original %.4f, in NF4 by absmax %.4f, calibrated %.4f nats",
            mean[ORIGINAL], mean[ABSMAX], mean[CALIBRATED],
        )  # fmt: skip
    return HeldoutLosses(tokens=tokens, **losses)


def _write_files(
    folder: Path, inputs: CalibrationInputs, settings: QuantizeConfig, stream: LayerStream
) -> int:
    """Put the finished layers and all other tensors into shards with an index; return their
    bytes."""
    writer = ShardWriter(folder, shard_bytes=SHARD_BYTES)
    in_layers = {
        name for number in range(len(stream.layers)) for name in stream.stored_names(number)
    }
    others = [name for name in inputs.reader.names() if name not in in_layers]
    for _, parts in quantized_tensors(
        inputs.reader, inputs.linears, settings, device=inputs.device, names=others
    ):
        writer.add(parts)
    for number in range(len(stream.layers)):
        writer.adopt(layer_path(folder, number))
    writer.close()
    return writer.total_bytes
