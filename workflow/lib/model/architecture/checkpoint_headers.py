"""The tensors of a checkpoint held against the description of its config.json: names, shapes and
types, from the safetensors headers alone.

A multimodal checkpoint keeps its decoder below a name of its own (`model.language_model.`), beside
what is left alone. Experts are published in several ways (a tensor for each projection of each
expert, or one for all), and some families under other names than Transformers gives the modules:
of these the weights are counted, and `quantize_base` holds each name against Transformers' table.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from workflow.lib.model.architecture.model_shape import FLOAT_BYTES, ModelShape
from workflow.lib.model.architecture.safetensors_headers import TensorInfo, read_headers
from workflow.lib.system.errors import UserError

NUMBER = re.compile(r"[0-9]{1,9}")


def with_checkpoint(shape: ModelShape, folder: Path) -> ModelShape:
    """Return the description with what the checkpoint in `folder` adds: the type of its weights,
    and the names of its decoder.

    Raises `UserError` if files are missing, broken, quantized already, or disagree with the
    description.
    """
    tensors = read_headers(folder)
    shape = replace(shape, prefix=_prefix(shape, tensors))
    _check_no_more_layers(shape, tensors, folder)
    others = _other_names(shape, tensors)
    for name, size in expected_tensors(shape):
        if name in tensors or not others:
            _check_tensor(tensors, name, size, folder=folder)
    for number in range(shape.num_layers if not others else 0):
        _check_experts(shape, number, tensors, folder)
    first = f"{shape.prefix}{layer_name(shape, 0, shape.layer(0).linears[0].path)}.weight"
    dtype = tensors[first if first in tensors else others[0]].dtype
    return replace(shape, source_dtype=dtype if dtype in FLOAT_BYTES else "BF16")


def _other_names(shape: ModelShape, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names, the largest tensor's first, under which a decoder has weights that its
    modules have under others; none if all have the modules' names, or if some are not there.

    Of a decoder that is there, tensors that nobody expects by name have at least as many weights as
    experts and the expected tensors that are missing.
    """
    expected = dict(expected_tensors(shape))
    missing = sum(math.prod(size) for name, size in expected.items() if name not in tensors)
    layers = [shape.layer(number) for number in range(shape.num_layers)]
    experts = sum(x.num_weights for layer in layers for x in layer.linears if x.experts > 1)
    others = {name: x for name, x in tensors.items() if name not in expected}
    is_found = any(".experts." in name for name in others) or not experts
    if missing == 0 and is_found:
        return []
    if any(x.dtype not in FLOAT_BYTES and not _is_decoded(n, tensors) for n, x in others.items()):
        return []
    if sum(_weights(name, x) for name, x in others.items()) < missing + experts:
        return []
    return sorted(others, key=lambda name: -_weights(name, others[name]))


def _weights(name: str, tensor: TensorInfo) -> int:
    return math.prod(tensor.shape) * (2 if name.endswith("_blocks") else 1)  # two codes a byte


def layer_name(shape: ModelShape, number: int, path: str) -> str:
    """Return the name of something in a decoder layer, without the decoder's prefix."""
    return f"{shape.layers.removeprefix(_decoder(shape))}.{number}.{path}"


def _decoder(shape: ModelShape) -> str:
    """The path of the decoder in the model, with its point: `model.`."""
    return shape.embedding.rpartition(".")[0] + "."


def expected_tensors(shape: ModelShape) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Yield the name in the checkpoint and the shape of every tensor of the decoder but of experts;
    of 1-D tensors the elements.
    """
    table = (shape.vocab_size, shape.hidden_size)
    yield f"{shape.prefix}{shape.embedding.removeprefix(_decoder(shape))}.weight", table
    others: list[tuple[str, tuple[int, ...]]] = [
        *((name, (length,)) for name, length in shape.other_vectors),
        *((f"{x.path}.weight", (x.out_features, x.in_features)) for x in shape.other_linears),
        *shape.other_tables,
    ]
    for name, sizes in others:
        inside = name.startswith(_decoder(shape))
        yield (shape.prefix if inside else "") + name.removeprefix(_decoder(shape)), sizes
    if not shape.tied_embeddings:
        yield f"{shape.head}.weight", table
    for number in range(shape.num_layers):
        layer = shape.layer(number)
        for linear in (x for x in layer.linears if x.experts == 1):
            name = layer_name(shape, number, f"{linear.path}.weight")
            yield f"{shape.prefix}{name}", (linear.out_features, linear.in_features)
        for vector, length in layer.vectors:
            yield f"{shape.prefix}{layer_name(shape, number, vector)}", (length,)


def _prefix(shape: ModelShape, tensors: Mapping[str, TensorInfo]) -> str:
    """What the decoder's names begin with: as described, or, of a multimodal checkpoint, what
    stands before its embedding.
    """
    if shape.prefix == _decoder(shape):
        return shape.prefix
    embedding = f"{shape.embedding.removeprefix(_decoder(shape))}.weight"
    found = [name for name in tensors if name.endswith(f".{embedding}")]
    return found[0].removesuffix(embedding) if len(found) == 1 else shape.prefix


def _check_tensor(
    tensors: Mapping[str, TensorInfo], name: str, shape: tuple[int, ...], *, folder: Path
) -> None:
    if name not in tensors:
        raise UserError(
            f"{folder}: the checkpoint has no tensor {name}, which its config.json asks for. "
            "The files do not belong together, or the download is not complete: check model.source."
        )
    tensor = tensors[name]
    if tensor.dtype not in FLOAT_BYTES and not _is_decoded(name, tensors):
        raise UserError(
            f"{folder}: {name} is stored as {tensor.dtype}: the model is quantized already. "
            "Set model.source to the original bf16, fp16 or fp32 checkpoint."
        )
    if tensor.shape != shape and not (len(shape) == 1 and _elements(tensor) == shape[0]):
        raise UserError(
            f"{folder}: {name} has shape {list(tensor.shape)}, but config.json says {list(shape)}. "
            "The files do not belong together: check model.source."
        )


def _check_experts(
    shape: ModelShape, number: int, tensors: Mapping[str, TensorInfo], folder: Path
) -> None:
    """Raise `UserError` unless a layer's tensors of experts have as many weights as its stacks."""
    stacks = [linear for linear in shape.layer(number).linears if linear.experts > 1]
    if not stacks:
        return
    layer = f"{shape.prefix}{layer_name(shape, number, '')}"
    stored = {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(layer) and ".experts." in name and _is_weight(name, tensor)
    }
    expected = sum(linear.num_weights for linear in stacks)
    found = sum(_weights(name, tensor) for name, tensor in stored.items())
    if found != expected:
        raise UserError(
            f"{folder}: the experts of {layer.removesuffix('.')} have {found:,} weights in "
            f"{len(stored)} tensors, but config.json says {stacks[0].experts} experts of "
            f"{expected:,} weights together. The files do not belong together, or the download is "
            "not complete: check model.source."
        )
    for name, tensor in stored.items():
        if tensor.dtype not in FLOAT_BYTES and not _is_decoded(name, tensors):
            raise UserError(
                f"{folder}: experts are stored as {tensor.dtype}: the model is quantized already. "
                "Set model.source to the original bf16, fp16 or fp32 checkpoint."
            )


def _is_weight(name: str, tensor: TensorInfo) -> bool:
    others = ("bias", "_scale_inv", "_scales")
    return len(tensor.shape) >= 2 and not name.endswith(others)


def _is_decoded(name: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a packed tensor has the scales by which it is decoded when it is read."""
    blocks = name.removesuffix("_blocks")
    return f"{name}_scale_inv" in tensors or (blocks != name and f"{blocks}_scales" in tensors)


def _elements(tensor: TensorInfo) -> int:
    """Of a tensor that is 1-D, or a single number."""
    return tensor.shape[0] if len(tensor.shape) == 1 else 1 if not tensor.shape else -1


def _check_no_more_layers(
    shape: ModelShape, tensors: Mapping[str, TensorInfo], folder: Path
) -> None:
    start = f"{shape.prefix}{shape.layers.removeprefix(_decoder(shape))}."
    rests = (name.removeprefix(start).split(".")[0] for name in tensors if name.startswith(start))
    last = max((int(number) for number in rests if NUMBER.fullmatch(number)), default=0)
    if last >= shape.num_layers:
        raise UserError(
            f"{folder}: the checkpoint has decoder layer {last}, but config.json says "
            f"num_hidden_layers = {shape.num_layers}. The files do not belong together: check "
            "model.source."
        )
