"""Calibrated quantization of all layers that goes on where it was stopped.

A layer is a file as soon as it is finished. The hidden states between two layers are one more file,
written anew every `STATE_S` seconds; after a kill the layers since then are computed again, to the
same bytes. Both lie in the folder that becomes the base."""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from workflow.lib.quantization.beside import Beside, beside_of
from workflow.lib.quantization.calibration import MODELS, Calibration, Hidden, QuantizedLayer
from workflow.lib.quantization.layer_stream import LayerStream
from workflow.lib.quantization.nf4_codes import packed_codes, stored_tensors
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.files import atomic_path
from workflow.lib.system.progress import Progress

logger = logging.getLogger("workflow")

STATE = "hidden.safetensors"
STATE_S = 30.0
HIDDEN = "hidden"


def calibrated_layers(
    calibration: Calibration,
    stream: LayerStream,
    folder: Path,
    settings: QuantizeConfig,
    *,
    fingerprint: str,
) -> Hidden:
    """Quantize every layer into `layer_path(folder, number)`; return what comes out of the last.
    fingerprint: of all that the result depends on; work of another one is not continued."""
    count = len(stream.layers)
    done, hidden, beside = read_state(folder, fingerprint) or (0, calibration.first_hidden(), {})
    for name, values in beside.items():
        for batch, value in zip(calibration.batches[name], values, strict=True):
            batch.beside = {done: value}
    if done:
        logger.info("calibration: %d of %d layers are finished already", done, count)
    saved = time.monotonic()
    with Progress("calibrating", total=count - done, unit="layers") as progress:
        for number in range(done, count):
            layer = calibration.quantize(number, hidden)
            _write_layer(layer_path(folder, number), layer, stream, number, settings)
            if time.monotonic() - saved > STATE_S or number + 1 == count:
                beside = {
                    name: [batch.beside[number + 1] for batch in batches]
                    for name, batches in calibration.batches.items()
                }
                write_state(folder, hidden, beside, layers=number + 1, fingerprint=fingerprint)
                saved = time.monotonic()
            progress.add(1)
    return hidden


def layer_path(folder: Path, number: int) -> Path:
    return folder / f"layer-{number:05d}.safetensors"


def _write_layer(
    path: Path, layer: QuantizedLayer, stream: LayerStream, number: int, settings: QuantizeConfig
) -> None:
    """Write a layer's tensors: linears and experts packed, all others as the source has them."""
    prefix = stream.prefixes[number]
    tensors: dict[str, torch.Tensor] = {}
    for name in stream.stored_names(number):
        inside = name.removeprefix(f"{prefix}.")
        linear = inside.removesuffix(".weight")
        if inside in layer.stacks:
            stack, dtype = layer.stacks[inside], stream.source_type(name)
            parts = stored_tensors(
                stack.codes, stack.scales, settings, shape=stack.shape, dtype=dtype
            )
            tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
        elif linear != inside and linear in layer.rounded:
            rounded, dtype = layer.rounded[linear], stream.source_type(name)
            packed = packed_codes(rounded.codes.reshape(-1))
            parts = stored_tensors(
                packed, rounded.scales, settings, shape=tuple(rounded.codes.shape), dtype=dtype
            )
            tensors |= {f"{prefix}.{linear}.{suffix}": part for suffix, part in parts.items()}
        else:
            tensors[name] = stream.source_tensor(name)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def remove_state(folder: Path) -> None:
    (folder / STATE).unlink()


def write_state(
    folder: Path,
    hidden: Hidden,
    beside: Mapping[str, Sequence[Beside]],
    *,
    layers: int,
    fingerprint: str,
) -> None:
    """Keep the hidden states after so many layers, and `beside`, in place of earlier ones."""
    tensors = {
        f"{name}.{number}.{HIDDEN}": states.contiguous()
        for name, batches in hidden.items()
        for number, states in enumerate(batches)
    } | {
        f"{name}.{number}.{key}": tensor.clone(memory_format=torch.contiguous_format)
        for name, batches in beside.items()
        for number, handed_on in enumerate(batches)
        for key, tensor in handed_on.tensors().items()
    }
    metadata = {"layers": str(layers), "fingerprint": fingerprint}
    with atomic_path(folder / STATE) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def read_state(
    folder: Path, fingerprint: str
) -> tuple[int, Hidden, dict[str, list[Beside]]] | None:
    """Return how many layers are finished, and the state after them; None if there is none."""
    try:
        with safe_open(folder / STATE, framework="pt") as file:
            facts = file.metadata()
            if facts["fingerprint"] != fingerprint:
                return None
            layers = int(facts["layers"])
            found: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                name, number, part = key.split(".", 2)
                batches = found.setdefault(name, {})
                batches.setdefault(int(number), {})[part] = file.get_tensor(key)
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if not all(layer_path(folder, number).is_file() for number in range(layers)):
        return None
    ordered = {name: [batches[n] for n in sorted(batches)] for name, batches in found.items()}
    hidden = {name: [parts.pop(HIDDEN) for parts in batches] for name, batches in ordered.items()}
    beside = {name: [beside_of(parts) for parts in batches] for name, batches in ordered.items()}
    return layers, {model: [] for model in MODELS} | hidden, beside
