"""A checkpoint compared with Transformers' own loading of it.

The family's `from_pretrained` gets meta tensors and reports missing, misshapen and unused ones."""

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from workflow.lib.checkpoints.converted_reader import ConvertedReader
from workflow.lib.checkpoints.decoder_layers import decoder_layers, other_parts
from workflow.lib.checkpoints.files.quantization_settings import QUANTIZATION
from workflow.lib.checkpoints.files.safetensors_headers import FLOAT_BYTES
from workflow.lib.checkpoints.meta_model import quiet_transformers, said_by
from workflow.lib.system.errors import UserError

# Keys of config.json for the layers of multi-token prediction after the decoder layers.
EXTRA_LAYERS = (
    "num_nextn_predict_layers",
    "num_mtp_modules",
    "num_mtp_layers",
    "mtp_num_layers",
    "mtp_num_hidden_layers",
)
NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class LeftOver:
    """Tensors that Transformers does not load."""

    stored: tuple[str, ...]  # names of all such tensors in the checkpoint
    unexpected: tuple[str, ...]
    """Of these, the tensors that the family does not list as ignored, by Transformers' names."""


def check_loading(reader: ConvertedReader) -> LeftOver:
    """Return the tensors that Transformers does not load; raise `UserError` unless it loads every
    tensor of the model in its shape and a quantizable type. Reads headers alone."""
    reader.check_parts()
    model = reader.module_names.model
    if reader.packed and not reader.quantization:
        raise UserError(
            f"{reader.folder}: {min(reader.packed)} is packed, but config.json says nothing of it "
            f"({QUANTIZATION}), so Transformers would take its codes for weights. The files do not "
            "belong together: check model.source."
        )
    report = _report(model, reader)
    tensors = model.state_dict()
    owned = [name for name in tensors if reader.module_names.owner(name) == name]
    missing = sorted({name for name in owned if name not in reader} | report["missing_keys"])
    if missing:
        others = f", but {len(reader.left)} others ({reader.left[0]} first)" if reader.left else ""
        raise UserError(
            f"{reader.folder}: the checkpoint has no tensor {missing[0]}, nor {len(missing) - 1} "
            f"more that the model of its config.json has{others}. The files do not belong "
            "together, or the download is not complete: check model.source."
        )
    if divided := reader.divided(other_parts(model)):
        raise UserError(
            f"{reader.folder}: model_type = {model.config.model_type!r}: its files keep {divided} "
            "and other weights of the decoder in one tensor, which this workflow cannot write back "
            "in parts. Choose another model.source."
        )
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{reader.folder}: {name} has shape {[*stored]}, but config.json says {[*expected]}. "
            "The files do not belong together: check model.source."
        )
    for name in owned:
        dtype = reader.dtype(name)
        if tensors[name].is_floating_point() and dtype not in FLOAT_BYTES:
            raise UserError(
                f"{reader.folder}: {name} is stored as {dtype}, which is neither bf16, fp16 nor "
                "fp32, nor a format that is decoded. Set model.source to the original bf16, fp16 "
                "or fp32 checkpoint."
            )
    _check_no_more_layers(model, report["unexpected_keys"], reader.folder)
    return LeftOver(stored=tuple(reader.left), unexpected=tuple(sorted(report["unexpected_keys"])))


def _report(model: PreTrainedModel, reader: ConvertedReader) -> dict[str, Any]:
    """Return Transformers' report on loading tensors of these names and shapes."""
    config = copy.deepcopy(model.config)
    for part in (config, config.get_text_config()):
        part.__dict__.pop(QUANTIZATION, None)  # they have the names that they are decoded to
    stored = {
        name: torch.empty(shape, device="meta", dtype=torch.bfloat16)
        for name, shape in reader.stored_shapes().items()
    }
    try:
        with quiet_transformers():
            loaded: Any = type(model).from_pretrained(
                None,
                config=config,
                state_dict=stored,
                dtype=torch.bfloat16,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(
            f"{reader.folder}: Transformers {transformers.__version__} cannot load the checkpoint "
            f"into the model of its config.json ({said_by(error)}). The files do not belong "
            "together: check model.source."
        ) from None
    report: dict[str, Any] = loaded[1]
    return report


def first_weight(model: PreTrainedModel) -> str:
    """Return the name of the first weight of the decoder layers with two dimensions or more."""
    (first, *_) = decoder_layers(model)
    (path,) = (path for path, module in model.named_modules() if module is first)
    return next(f"{path}.{name}" for name, x in first.named_parameters() if x.dim() > 1)


def _check_no_more_layers(model: PreTrainedModel, reported: Iterable[str], folder: Path) -> None:
    """Raise `UserError` for extra decoder layers that family and config.json do not know."""
    layers = decoder_layers(model)
    first = next(path for path, module in model.named_modules() if module is layers[0])
    start = first.rpartition(".")[0] + "."
    rests = (name.removeprefix(start).split(".")[0] for name in reported if name.startswith(start))
    numbers = [int(number) for number in rests if NUMBER.fullmatch(number)]
    config: Any = model.config.get_text_config()
    extra = max(int(getattr(config, key, None) or 0) for key in EXTRA_LAYERS)
    beyond = [number for number in numbers if number >= len(layers) + extra]
    if beyond:
        raise UserError(
            f"{folder}: the checkpoint has decoder layer {max(beyond)}, but config.json says "
            f"num_hidden_layers = {len(layers)}. The files do not belong together: check "
            "model.source."
        )
