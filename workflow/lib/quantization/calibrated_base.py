"""A whole NF4 base by calibration: rows, layers, tensors outside of layers, and the measured cost
of 4 bits.

Too little GPU memory is an error before any computation. Memory peaks at a linear or an expert: the
matrices over its inputs, several copies of its weight, the layer itself.

A stopped calibration resumes. A finished layer is a file. The hidden states between two layers are
one more file, rewritten every `STATE_S` seconds; after a kill the layers since then are computed
again, to the same bytes. Both lie in the folder that becomes the base."""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from workflow.lib.artifacts.records import CalibrationFacts, HeldoutLosses
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import experts_modules
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.data.tokens.packing import text_lengths
from workflow.lib.data.tokens.token_store import TokenStore, choose_documents
from workflow.lib.quantization.calibration import (
    ABSMAX,
    CALIBRATED,
    MODELS,
    ORIGINAL,
    Calibration,
    Hidden,
    LoadedStack,
    QuantizedLayer,
    loaded_stacks,
)
from workflow.lib.quantization.layer_stream import Batch, LayerCarry, LayerStream, carry_of
from workflow.lib.quantization.nf4_checkpoint import (
    SHARD_BYTES,
    BaseWeights,
    ShardWriter,
    quantized_tensors,
)
from workflow.lib.quantization.nf4_codes import packed_codes, stored_tensors
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import atomic_path
from workflow.lib.system.input_files import read_input
from workflow.lib.system.progress import Progress
from workflow.lib.system.units import GIB

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
    """Quantize every layer into `layer_path(folder, number)`; return the last one's output.
    fingerprint: of all that the result depends on; other work is not resumed."""
    count = len(stream.layers)
    done, hidden, beside = read_state(folder, fingerprint) or (0, {**calibration.first_hidden}, {})
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
    """Return the file of a finished decoder layer."""
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
            tensors[name] = stream.reader.tensor(name)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def write_state(
    folder: Path,
    hidden: Hidden,
    beside: Mapping[str, Sequence[LayerCarry]],
    *,
    layers: int,
    fingerprint: str,
) -> None:
    """Save the hidden states after so many layers, and `beside`, in place of earlier ones."""
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
) -> tuple[int, Hidden, dict[str, list[LayerCarry]]] | None:
    """Return the number of finished layers, and the state after them; None without a state."""
    try:
        with safe_open(folder / STATE, framework="pt") as file:
            facts = file.metadata()
            if facts["fingerprint"] != fingerprint:
                return None
            layers = int(facts["layers"])
            batches_by_model: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                name, number, part = key.split(".", 2)
                batches = batches_by_model.setdefault(name, {})
                batches.setdefault(int(number), {})[part] = file.get_tensor(key)
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if not all(layer_path(folder, number).is_file() for number in range(layers)):
        return None
    ordered = {
        name: [batches[n] for n in sorted(batches)] for name, batches in batches_by_model.items()
    }
    hidden = {name: [parts.pop(HIDDEN) for parts in batches] for name, batches in ordered.items()}
    beside = {name: [carry_of(parts) for parts in batches] for name, batches in ordered.items()}
    return layers, {model: [] for model in MODELS} | hidden, beside


SEED = 0  # of drawn rows and documents
BATCH_TOKENS = 8192  # in one forward of a layer
MEASURED_DOCUMENTS = 64  # held out, for the cost of 4 bits
MEASURED_TOKENS = 32_768  # of these at most: each is cut to its share
# Scores of eager attention in a layer at once: 2 GiB in 8 bytes each. One row may have more.
SCORES = 2**28
MOST_BYTES = 2**32  # of a calibration text, which is read whole


def calibration_batches(
    settings: QuantizeConfig,
    store: TokenStore,
    model: Checkpoint,
    *,
    device: torch.device,
    eager_heads: int = 0,
) -> list[Batch]:
    """Return batches of `calibration_tokens` training tokens, half of them from `calibration_text`
    if given. eager_heads: heads with all scores of a row. Raises `UserError` for too few rows or
    tokens."""
    wanted = settings.calibration_tokens
    size = rows_at_once(store.seq_len, eager_heads=eager_heads)
    general: list[Batch] = []
    if settings.calibration_text is not None:
        ids = text_rows(settings.calibration_text, model, tokens=wanted // 2, width=store.seq_len)
        general = _batches(ids, None, device, size=size)
        wanted -= ids.size
    return _training_batches(store, tokens=wanted, device=device, size=size) + general


def rows_at_once(width: int, *, eager_heads: int) -> int:
    """Return the rows of `width` tokens in a batch; eager_heads: heads whose scores are stored."""
    scores = max(1, eager_heads) * width**2
    return max(1, min(BATCH_TOKENS // width, SCORES // scores))


def _training_batches(
    store: TokenStore, *, tokens: int, device: torch.device, size: int
) -> list[Batch]:
    if not store.num_rows:
        raise UserError("calibration: the tokens hold no training row. Set quantize.method: absmax")
    wanted = max(1, round(tokens / store.seq_len))
    count = min(store.num_rows, wanted)
    if count < wanted:
        logger.warning(
            "quantize.calibration_tokens asks for %d rows of %d tokens, and there are %d: all "
            "calibrate",
            wanted,
            store.seq_len,
            count,
        )
    rows = drawn_rows(store.num_rows, count=count)
    positions = store.position_ids[rows]
    batches = _batches(store.input_ids[rows], positions, device, size=size)
    # the padding token may be the end of every turn: padding is a place, not a token
    lengths = torch.from_numpy(text_lengths(positions, store.loss_mask[rows])).to(device)
    counted = torch.arange(store.seq_len, device=device) < lengths[:, None]
    return [replace(x, counted=c) for x, c in zip(batches, counted.split(size), strict=True)]


def drawn_rows(num_rows: int, *, count: int) -> list[int]:
    """Return the numbers of `count` rows, drawn by `SEED`."""
    drawn = np.random.default_rng(SEED).choice(num_rows, size=count, replace=False)
    return sorted(drawn.tolist())


def text_rows(path: str, model: Checkpoint, *, tokens: int, width: int) -> np.ndarray:
    """Return rows (rows, width) of a UTF-8 file's tokens, `tokens` in all, or raise `UserError`."""
    try:
        text = read_input(Path(path), most_bytes=MOST_BYTES)
    except UserError as error:
        raise setting_error(
            "quantize.calibration_text", path, f"it cannot be read as UTF-8 text ({error})",
            "Name a text file, or remove the setting",
        ) from None  # fmt: skip
    ids = model.tokenizer()(text, add_special_tokens=False).input_ids
    rows = min(len(ids), tokens) // width
    if not rows:
        raise setting_error(
            "quantize.calibration_text", path,
            f"it has {len(ids)} tokens, and a row (data.seq_len) {width}",
            "Name a longer text, or remove the setting",
        )  # fmt: skip
    return np.asarray(ids[: rows * width], dtype=np.int64).reshape(rows, width)


def _batches(
    ids: np.ndarray, positions: np.ndarray | None, device: torch.device, *, size: int
) -> list[Batch]:
    def tensor(rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(device)

    return [
        Batch(
            tensor(ids[first : first + size]),
            None if positions is None else tensor(positions[first : first + size]),
        )
        for first in range(0, len(ids), size)
    ]


def measured_batches(
    store: TokenStore, *, device: torch.device, eager_heads: int = 0
) -> list[Batch]:
    """Return held-out documents, a batch each, drawn by `SEED`, about `MEASURED_TOKENS` in all, cut
    if `eager_heads` would make more than `SCORES`."""
    documents = store.heldout_documents()
    chosen = choose_documents(documents, at_most=MEASURED_DOCUMENTS, seed=SEED)
    longest = max(1, MEASURED_TOKENS // max(1, len(chosen)))
    longest = min(longest, math.isqrt(SCORES // max(1, eager_heads)))
    cut = ([part[:longest] for part in documents[number]] for number in chosen)
    return [Batch.from_document(ids, mask, device) for ids, mask in cut if np.any(mask)]


# fp32 matrices of (in, in) at a time: correlation, inverse, and its factor.
MATRICES = 3
# fp32 copies of a weight at a time: the rounded one, the rest, decoded by both methods, scales, and
# indexing.
WEIGHT_COPIES = 7
# Experts of a token: the most of known families (Qwen3-Next).
TOP_K = 10
# Bytes of a score of eager attention in 16 bits: capped or with a sink, and its softmax.
SCORE_BYTES = 8
# fp32 copies of a stack's scales at a time, of a block of 64 weights each.
SCALE_COPIES, BLOCK_SIZE = 5, 64


@dataclass(frozen=True)
class CalibrationInputs:
    model: Checkpoint  # the original
    reader: CheckpointReader  # of it
    store: TokenStore
    weights: BaseWeights
    device: torch.device
    dtype: torch.dtype  # of activations


def write_calibrated(
    folder: Path, inputs: CalibrationInputs, settings: QuantizeConfig, *, fingerprint: str
) -> tuple[int, CalibrationFacts]:
    """Write a calibrated checkpoint's weights to `folder`; return their bytes, and the measured
    facts. Resumes work of the same fingerprint in the folder."""
    stream = LayerStream(inputs.model, inputs.reader, device=inputs.device, dtype=inputs.dtype)
    heads = stream.eager_heads
    rows = calibration_batches(
        settings, inputs.store, inputs.model, device=inputs.device, eager_heads=heads
    )
    measured = measured_batches(inputs.store, device=inputs.device, eager_heads=heads)
    shapes = [batch.input_ids.shape for batch in (*rows, *measured)]
    scores = heads * max(num_rows * width**2 for num_rows, width in shapes)
    check_gpu_memory(stream.layers, inputs.device, scores=scores)
    counts = (x.input_ids.numel() if x.counted is None else x.counted.sum() for x in rows)
    tokens = sum(map(int, counts))
    logger.info(
        "calibrating %d layers with %d tokens; %d held-out documents show what 4 bits cost",
        len(stream.layers), tokens, len(measured),
    )  # fmt: skip
    paths = {*inputs.weights.linears, *inputs.weights.stacks}
    calibration = Calibration(stream, rows, measured, settings, paths=paths)
    hidden = calibrated_layers(calibration, stream, folder, settings, fingerprint=fingerprint)
    facts = CalibrationFacts(tokens=tokens, heldout=_heldout_losses(calibration, hidden))
    total_bytes = _write_files(folder, inputs, settings, stream)
    (folder / STATE).unlink()
    return total_bytes, facts


def _heldout_losses(calibration: Calibration, hidden: Hidden) -> HeldoutLosses:
    """Return each held-out document's summed loss (nats) by model, and its tokens; log means."""
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
    """Write the finished layers and all other tensors as shards with an index; return bytes."""
    writer = ShardWriter(folder, shard_bytes=SHARD_BYTES)
    in_layers = {
        name for number in range(len(stream.layers)) for name in stream.stored_names(number)
    }
    others = [name for name in inputs.reader.names() if name not in in_layers]
    for _, parts in quantized_tensors(
        inputs.reader, inputs.weights, settings, device=inputs.device, names=others
    ):
        writer.add(parts)
    for number in range(len(stream.layers)):
        writer.adopt(layer_path(folder, number))
    writer.close()
    return writer.total_bytes


def layer_bytes(layer: nn.Module, *, scores: int = 0) -> int:
    """Bytes on the GPU while a decoder layer is calibrated; scores: of eager attention. 15 to 29%
    above what one H200 allocated, 54% where eager attention takes most (torch 2.11, 2026-11-25,
    docs/results.md)."""
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    stacks = [x for _, experts in experts_modules(layer) for x in loaded_stacks(experts).values()]
    shapes = [(x.out_features, x.in_features) for x in linears] + [x.shape[1:] for x in stacks]
    widest = max(in_features for _, in_features in shapes)
    largest = max(out_features * in_features for out_features, in_features in shapes)
    weights = sum(p.nbytes for p in layer.parameters())
    in_stacks = sum(stack.weights.nbytes for stack in stacks)
    matrices = 4 * (MATRICES * widest**2 + WEIGHT_COPIES * largest)
    inputs = 3 * 4 * BATCH_TOKENS * widest
    # the layer, and its linears' original weights and one-byte codes
    layer_and_codes = weights + 3 * (weights - in_stacks) // 2
    # attention has ended before the matrices are made
    return layer_and_codes + max(matrices, SCORE_BYTES * scores) + inputs + _stack_bytes(stacks)


def _stack_bytes(stacks: Sequence[LoadedStack]) -> int:
    """Additional bytes of experts: rows sorted by expert around both matmuls, and scales."""
    if not stacks:
        return 0
    widths = sum(sum(stack.shape[1:]) for stack in stacks)
    rows = TOP_K * BATCH_TOKENS * widths * stacks[0].weights.element_size()
    return rows + 4 * SCALE_COPIES * max(x.weights.numel() for x in stacks) // BLOCK_SIZE


def check_gpu_memory(layers: Iterable[nn.Module], device: torch.device, *, scores: int = 0) -> None:
    """Raise `UserError` if a layer does not fit in free GPU memory; scores: `layer_bytes`."""
    if device.type != "cuda":
        return
    needed = max(layer_bytes(layer, scores=scores) for layer in layers)
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise setting_error(
            "quantize.method",
            "calibrated",
            f"calibrating a layer of this model takes about {needed / GIB:.1f} GiB of a GPU, and "
            f"{free / GIB:.1f} GiB are free",
            "Set it to absmax, or calibrate on a GPU with more memory: the base can be copied",
        )
