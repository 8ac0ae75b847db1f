"""Other formats of the merged model, whose folders Transformers opens (`forms.CONVERTED`)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.model_files import CONFIG
from workflow.lib.checkpoints.files.quantization_settings import QUANTIZATION
from workflow.lib.export import w4a16
from workflow.lib.quantization.nf4_checkpoint import ShardWriter, copy_companions
from workflow.lib.system.files import write_checksums, write_json


class Conversion(NamedTuple):
    """Functions of a format.

    write: packs the weights of the model in a folder on a device, and returns the format's
    `quantization_config`. check: raises `UserError` if the merged model of a base cannot have this
    format."""

    write: Callable[[Checkpoint, ShardWriter, torch.device], dict[str, Any]]
    check: Callable[[Checkpoint], None]


CONVERSIONS: Mapping[str, Conversion] = {"w4a16": Conversion(w4a16.write, w4a16.check)}


def convert(
    form: str, merged: Checkpoint, folder: Path, *, shard_bytes: int, device: torch.device
) -> None:
    """Write a merged model in another format to an empty folder."""
    writer = ShardWriter(folder, shard_bytes=shard_bytes)
    quantization = CONVERSIONS[form].write(merged, writer, device)
    writer.close()
    copy_companions(merged.folder, folder)
    write_json(folder / CONFIG, merged.config | {QUANTIZATION: quantization})
    write_checksums(folder)
