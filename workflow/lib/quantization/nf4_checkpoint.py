"""Streaming quantization, a tensor at a time, in the layout that stock Transformers loads.

Per linear: `weight` uint8 (n/2, 1), `weight.absmax`, `weight.quant_map`, with double quantization
`weight.nested_absmax` and `weight.nested_quant_map`, and `weight.quant_state.bitsandbytes__nf4`
(packed JSON); a stack of experts alike (`nf4_codes`). All else is copied, weights that stay in 16
bits too. The bytes of a base published in NF4 are taken, if the engine can compute with them."""

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import quantize_4bit
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.converted_reader import ConvertedReader
from workflow.lib.checkpoints.decoder_layers import ExpertStack, expert_stacks, other_parts
from workflow.lib.checkpoints.files.model_files import PROCESSOR_PATTERN, TOKENIZER_PATTERNS
from workflow.lib.checkpoints.files.safetensors_headers import INDEX
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.kernels.nf4.decode import NESTED_BLOCK_SIZE
from workflow.lib.model.adaptable_linears import (
    adaptable_linears,
    nf4_specs,
    skipped_modules,
    weight_specs,
)
from workflow.lib.model.architecture.kept_linears import checked_linears
from workflow.lib.model.nf4_model import replace_linears_
from workflow.lib.quantization.nf4_codes import quantize_stack
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import atomic_path, write_json

BLOCK_OF_BITSANDBYTES = 64  # weights a scale; `BitsAndBytesConfig` (Transformers 5.23) has no other
SHARD_BYTES = 2**30  # bounds the host memory before a write

IN_16_BITS = "llm_int8_skip_modules"  # Transformers' name for modules that stay in 16 bits

# Files of a complete model folder besides its weights.
COMPANION_PATTERNS = ("generation_config.json", PROCESSOR_PATTERN, *TOKENIZER_PATTERNS)
# What goes with every copy of its weights, by its terms.
LICENCE_PATTERNS = ("LICEN[CS]E*", "NOTICE*", "COPYING*", "USE_POLICY*")


@dataclass(frozen=True)
class BaseWeights:
    """The adaptable weights of a model, by their bits in a base."""

    linears: dict[str, tuple[int, int]]  # in NF4: path and shape (out, in)
    stacks: dict[str, ExpertStack]  # in NF4
    kept: frozenset[str]  # paths in 16 bits
    in_16_bits: list[str]
    """Transformers' `llm_int8_skip_modules`; empty for the output head alone."""

    @classmethod
    def of(cls, model: PreTrainedModel, settings: QuantizeConfig) -> "BaseWeights":
        """Divide a model's weights by the settings. Raises `UserError` for a model without linears
        or with unknown experts, and an entry of `keep` that keeps nothing."""
        linears, stacks = adaptable_linears(model), expert_stacks(model)
        check_model(model, linears)
        kept = checked_linears(settings, [*linears, *stacks])
        return cls(
            {path: shape for path, shape in linears.items() if path not in kept},
            {path: stack for path, stack in stacks.items() if path not in kept},
            kept,
            skipped_modules(model, kept),
        )

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all weights in NF4."""
        return [*self.linears.values(), *(stack.shape for stack in self.stacks.values())]


def packed_on_meta(
    model: PreTrainedModel, *, dtype: torch.dtype, block_size: int = 64, double_quant: bool = True
) -> PreTrainedModel:
    """Return a meta model (without other parts) as of a base, in NF4 unless marked."""
    packed = nf4_specs(model, block_size=block_size, double_quant=double_quant)
    specs = weight_specs(model, packed, dtype=dtype)
    return replace_linears_(model, specs, compute_dtype=dtype)


def quantize_tensor(
    weight: torch.Tensor, settings: QuantizeConfig, *, device: torch.device
) -> dict[str, torch.Tensor]:
    """Quantize a weight (out, in) on `device`; return its checkpoint tensors by suffix, CPU."""
    packed, state = quantize_4bit(
        weight.to(device).contiguous(),
        blocksize=settings.block_size,
        compress_statistics=settings.double_quant,
        quant_type="nf4",
    )
    parts = {"weight": packed} | {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    return {name: part.cpu().contiguous() for name, part in parts.items()}


def check_model(model: PreTrainedModel, linears: dict[str, tuple[int, int]]) -> None:
    """Raise `UserError` unless the model has linears to quantize, and known experts only."""
    if not linears:
        raise UserError(
            f"{type(model).__name__} has no linear layer besides its head (GPT-2 keeps its weights "
            "in another class): there is nothing to quantize. Choose another model.source."
        )
    if unknown := _unknown_stacks(model):
        raise UserError(
            f"{type(model).__name__} keeps the weights of several experts in {unknown[0]}, not in "
            "a module of Transformers' common kind, which alone is supported. Choose another "
            "model.source."
        )


def _unknown_stacks(model: PreTrainedModel) -> list[str]:
    """Return the decoder's (experts, out, in) weights outside of known linears and stacks."""
    stacks, others = expert_stacks(model), tuple(f"{path}." for path in other_parts(model))
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if not isinstance(module, nn.Conv1d) and not f"{path}.".startswith(others)
        for name, param in module.named_parameters(recurse=False)
        if param.dim() == 3 and min(param.shape) > 1 and f"{path}.{name}" not in stacks
    ]


def quantized_tensors(
    reader: CheckpointReader,
    weights: BaseWeights,
    settings: QuantizeConfig,
    *,
    device: torch.device,
    names: Iterable[str] | None = None,
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the name of every source tensor (or of `names`), and its replacement."""
    linears, stacks = weights.linears, weights.stacks
    for name in reader.names() if names is None else names:
        path = name if name in stacks else name.removesuffix(".weight")
        if name in stacks:
            parts = quantize_stack(
                reader.experts(name), settings, device=device, transposed=stacks[name].transposed
            )
        elif path == name or path not in linears:
            yield name, {name: reader.tensor(name)}
            continue
        elif (stored := reader.nf4_parts(name)) is not None:
            parts = stored  # kept unchanged
        else:
            parts = quantize_tensor(reader.tensor(name), settings, device=device)
        yield name, {f"{path}.{suffix}": part for suffix, part in parts.items()}


def write_plain_base(
    source: Checkpoint, target: Path, settings: QuantizeConfig, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the base of a small model to a new folder, without records, on the CPU."""
    target.mkdir(parents=True)
    writer = ShardWriter(target, shard_bytes=shard_bytes)
    weights = BaseWeights.of(source.model, settings)
    with source.weights() as reader:
        for _, parts in quantized_tensors(reader, weights, settings, device=torch.device("cpu")):
            writer.add(parts)
    writer.close()
    write_json(target / "config.json", base_config(source.plain_config, settings, weights))


class ShardWriter:
    """Collects tensors and writes a safetensors shard before `shard_bytes` would be exceeded."""

    def __init__(self, folder: Path, *, shard_bytes: int) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self.total_bytes = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending |= tensors
        self._pending_bytes += size
        self.total_bytes += size

    def adopt(self, path: Path) -> None:
        """Add a safetensors file of the folder, as one shard."""
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            self.total_bytes += sum(file.get_tensor(name).nbytes for name in names)
        self._shards.append((path, names))

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self._folder / f"part-{len(self._shards):05d}.safetensors"
        with atomic_path(path) as temporary:
            save_file(self._pending, temporary, metadata={"format": "pt"})
        self._shards.append((path, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0

    def close(self) -> None:
        """Write the rest, give the shards their final names, and write the index."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, start=1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        write_json(
            self._folder / INDEX,
            {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": dict(sorted(weight_map.items())),
            },
        )


def only_here(method: str, settings: QuantizeConfig, *, stacks: bool, packed: bool) -> str | None:
    """Return why Transformers' own quantization of the original gives other weights; None if it
    gives these. stacks: experts are in NF4, too; packed: the original is, or its config.json says
    so."""
    if method == "calibrated":
        return "their codes and scales are calibrated"
    if settings.block_size != BLOCK_OF_BITSANDBYTES:
        return (
            f"their blocks hold {settings.block_size} weights, and Transformers itself quantizes "
            f"in blocks of {BLOCK_OF_BITSANDBYTES}"
        )
    if stacks:
        return "experts are in 4 bits, which Transformers itself leaves in 16"
    if packed:
        return "the original is packed in fewer bits, or its config.json says so"
    return None


def base_config(
    original: dict[str, Any], settings: QuantizeConfig, weights: BaseWeights
) -> dict[str, Any]:
    """Return a base's `config.json`: the original's, with any weight in NF4 plus
    `quantization_config`."""
    if not weights.shapes:
        return original
    quantization = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": settings.double_quant,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
    }
    if weights.in_16_bits:
        quantization[IN_16_BITS] = weights.in_16_bits
    return original | {"quantization_config": quantization}


def copy_companions(source: Path, target: Path) -> None:
    patterns = (*COMPANION_PATTERNS, *LICENCE_PATTERNS)
    names = {path for pattern in patterns for path in source.glob(pattern)}
    for path in sorted(names):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


ORIGINAL = "Set model.source to the original bf16, fp16 or fp32 checkpoint"


def check_taken(reader: ConvertedReader, weights: BaseWeights, settings: QuantizeConfig) -> bool:
    """Tell whether a checkpoint is in NF4 already; raise `UserError` if it is, but unlike the
    settings, or only in part, or if a kept linear is published in fewer bits."""
    _check_kept(reader, weights.kept, settings)
    states = {path: reader.nf4_state(f"{path}.weight") for path in weights.linears}
    packed = {path: state for path, state in states.items() if state is not None}
    if not packed:
        return False
    if weights.stacks:
        raise UserError(
            f"{reader.folder} is in NF4 already, and has experts ({min(weights.stacks)}), of which "
            f"it says nothing in one piece. {ORIGINAL}."
        )
    if lacking := sorted(states.keys() - packed.keys()):
        raise UserError(
            f"{reader.folder} is in NF4 already, but {len(lacking)} of {len(states)} linears are "
            f"not ({lacking[0]} first). {ORIGINAL}, or name these linears in quantize.keep."
        )
    if settings.method == "calibrated":
        bound = f"{reader.folder} is in NF4 already, and its bytes are taken as they are"
        raise setting_error("quantize.method", "calibrated", bound, f"Set absmax. Or: {ORIGINAL}")
    for path, state in packed.items():
        _check_state(path, state, settings)
    return True


def check_measured(reader: ConvertedReader, weights: BaseWeights) -> None:
    """Raise `UserError` if `quantize.keep: auto` might keep a weight in 4 bits or so."""
    _check_kept(reader, {*weights.linears, *weights.stacks}, QuantizeConfig(keep="auto"))


def _check_kept(reader: ConvertedReader, paths: Collection[str], settings: QuantizeConfig) -> None:
    """Raise `UserError` if the checkpoint has a kept weight in 4 bits or so."""
    names = {path: path if path in reader else f"{path}.weight" for path in sorted(paths)}
    narrow = [path for path, name in names.items() if reader.in_few_bits(name)]
    if narrow:
        key, value = ("keep", settings.keep) if settings.keep else ("method", settings.method)
        change = "Leave it out of keep" if settings.patterns else "Set absmax"
        change = "Set keep to []" if settings.measures else change
        raise setting_error(
            f"quantize.{key}",
            list(value) if isinstance(value, tuple) else value,
            f"{reader.folder} is published in fewer bits ({narrow[0]} first of {len(narrow)} "
            "weights): there are no 16 bits to keep",
            f"{change}. Or: {ORIGINAL}",
        )


def _check_state(path: str, state: Mapping[str, Any], settings: QuantizeConfig) -> None:
    """Raise `UserError` unless a linear is stored by the settings (and the memory plan)."""
    stored_settings = {"block_size": state["blocksize"], "double_quant": "nested_offset" in state}
    for key, value in stored_settings.items():
        if getattr(settings, key) != value:
            raise setting_error(
                f"quantize.{key}",
                getattr(settings, key),
                f"{path} of model.source is in NF4 already, with {value}",
                f"Set {key} to {str(value).lower()}",
            )
    nested = state.get("nested_blocksize", NESTED_BLOCK_SIZE)
    if nested != NESTED_BLOCK_SIZE:
        raise UserError(
            f"{path} of model.source has blocks of {nested} scales; {NESTED_BLOCK_SIZE} are known. "
            f"{ORIGINAL}."
        )
