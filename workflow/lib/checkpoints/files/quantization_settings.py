"""Quantization settings of a config.json, compared with the tensors beside it.

A file may say null, or still describe packing of weights that are in 16 bits again: then the
settings count as absent."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workflow.lib.checkpoints.files.safetensors_headers import read_headers
from workflow.lib.system.errors import UserError

QUANTIZATION = "quantization_config"
MLX = "quantization"  # MLX's name of it, beside which newer files have Transformers'
TEXT_PART = "text_config"  # of a multimodal model
METHOD = "quant_method"
# Transformers' names; `checkpoints.decoded_reader` reads these formats.
DECODED_FORMATS = ("fp8", "mxfp4", "bitsandbytes", "gptq", "awq", "compressed-tensors")
GPTQ_BITS = (2, 4, 8)
COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
# Decoded kinds of some formats: the names of a setting (the first present one counts), its default,
# and all values.
FORMAT_NAMES = {"gptq": ("checkpoint_format", "format"), "awq": ("version", "format")}
DECODED_VALUES: dict[str, dict[tuple[str, ...], tuple[Any, tuple[Any, ...]]]] = {
    "gptq": {("bits",): (None, GPTQ_BITS), FORMAT_NAMES["gptq"]: ("gptq", ("gptq", "gptq_v2"))},
    "awq": {("bits",): (None, (4,)), FORMAT_NAMES["awq"]: ("gemm", ("gemm",))},
    "compressed-tensors": {
        ("format",): (None, (*COMPRESSED_FORMATS, "mixed-precision")),
        ("transform_config",): ({}, ({},)),
    },
}
# Dtypes and suffixes of packed weights, and of tensors that lie beside packed weights alone.
PACKED_TYPES = ("F8_E4M3", "F8_E5M2", "I8", "U32")
PACKED_NAMES = (".qweight", "weight_packed", "_blocks", "__nf4", "__fp4", ".SCB", "_qdata")
SCALE_NAMES = ("_scale_inv", "weight_scale", ".scales", ".qzeros", ".g_idx", ".absmax", "_scales")

logger = logging.getLogger("workflow")


def without_quantization(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a config.json without its quantization settings; raises `UserError` for a format that
    is not decoded, and as `quantization_of`."""
    settings = quantization_of(config, path)
    if settings is not None and settings.get(METHOD) not in DECODED_FORMATS:
        setting = f"{QUANTIZATION}.{METHOD} = {settings.get(METHOD)!r}"
        if MLX in config:
            setting = f"by MLX: {MLX} = {config[MLX]!r}"
        raise UserError(
            f"{path} describes a model that is quantized already ({setting}; "
            f"{', '.join(DECODED_FORMATS)} can be read). Set model.source to the original bf16, "
            "fp16 or fp32 checkpoint."
        )
    if settings is not None:
        _check_nf4(settings, path)
        _check_values(settings, path)
    plain = {key: value for key, value in config.items() if key != QUANTIZATION}
    part = plain.get(TEXT_PART)
    if isinstance(part, dict):
        plain[TEXT_PART] = {key: value for key, value in part.items() if key != QUANTIZATION}
    return plain


def quantization_of(config: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
    """Return the quantization settings; None if weights are not packed, whatever config.json says
    (it is believed if there are no weights beside it). Raises `UserError` if the settings are no
    object, or there are scales without packed weights."""
    settings = quantization_settings(config)
    if settings is None:
        return None
    method = settings.get(METHOD) if isinstance(settings, Mapping) else None
    if not isinstance(settings, Mapping) or not isinstance(method, str | None):
        setting = f".{METHOD} = {method!r}" if method else f" = {settings!r}"
        raise UserError(
            f"{path}: {QUANTIZATION}{setting}: it must be {'a text' if method else 'an object'} or "
            "null. Give the config.json that belongs to the checkpoint (model.source)."
        )
    files = sorted(path.parent.glob("*.safetensors"))
    tensors = read_headers(files)
    if not files or any(
        x.dtype in PACKED_TYPES or n.endswith(PACKED_NAMES) for n, x in tensors.items()
    ):
        return settings
    scales = sorted(name for name in tensors if name.endswith(SCALE_NAMES))
    if scales:
        raise UserError(
            f"{path} says that weights are packed ({QUANTIZATION}.{METHOD} = "
            f"{settings.get(METHOD)!r}), and {scales[0]} is a scale, but no packed weights lie "
            "beside it. The files do not belong together: download them again, or set "
            "model.source to the original bf16, fp16 or fp32 checkpoint."
        )
    return None


def _check_nf4(settings: Mapping[str, Any], path: Path) -> None:
    """Raise `UserError` for bitsandbytes weights in another format than NF4."""
    if settings.get(METHOD) != "bitsandbytes":
        return
    kind = settings.get("bnb_4bit_quant_type", "fp4") if settings.get("load_in_4bit") else "int8"
    if kind != "nf4":
        raise UserError(
            f"{path} describes a model that bitsandbytes has quantized to {kind}, and only nf4 is "
            "taken. Set model.source to the original bf16, fp16 or fp32 checkpoint."
        )


def _check_values(settings: Mapping[str, Any], path: Path) -> None:
    """Raise `UserError` for a kind of a format that is not decoded."""
    values = [
        (names[0], setting_value(settings, names, default), decodable)
        for names, (default, decodable) in DECODED_VALUES.get(settings[METHOD], {}).items()
    ]
    groups = settings.get("config_groups") or {}
    values += [
        (f"config_groups.{name}.format", group["format"], COMPRESSED_FORMATS)
        for name, group in groups.items()
        if isinstance(group, Mapping) and group.get("format") is not None
    ]
    for key, value, decodable in values:
        if value not in decodable:
            raise UserError(
                f"{path}: {QUANTIZATION}.{key} = {value!r} with {METHOD} = {settings[METHOD]!r}; "
                f"{', '.join(map(str, decodable))} can be read. Set model.source to the original "
                "bf16, fp16 or fp32 checkpoint."
            )


def setting_value(settings: Mapping[str, Any], names: tuple[str, ...], default: Any) -> Any:
    """Return a quantization setting under the first of its names that is set."""
    values = [settings[name] for name in names if settings.get(name) is not None]
    value = values[0] if values else default
    return value.lower() if isinstance(value, str) else value


def quantization_settings(config: Mapping[str, Any]) -> Any:
    """Return the quantization settings of a config.json; None if absent or null."""
    part = config.get(TEXT_PART)
    inner = part.get(QUANTIZATION) if isinstance(part, Mapping) else None
    by_mlx = config.get(MLX)
    candidates = (config.get(QUANTIZATION), inner, by_mlx if isinstance(by_mlx, Mapping) else None)
    return next((x for x in candidates if x is not None and x != {}), None)
