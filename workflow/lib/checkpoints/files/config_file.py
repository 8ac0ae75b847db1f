"""A model's config.json, checked before a library builds from it.

A config.json may hold any value. So sizes are compared with bounds before Transformers makes lists
of that length, and unsupported models are refused by name."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workflow.lib.checkpoints.files.quantization_settings import TEXT_PART, without_quantization
from workflow.lib.system.errors import UserError
from workflow.lib.system.input_files import read_input

# Far above any model, and far below sizes that take hours or all memory.
LAYERS = dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), 10_000)
LARGEST_SIZES = LAYERS | {
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**40,
}
MAX_CONFIG_BYTES = 2**24
SHOWN_DIGITS = 20
INFINITE = "__float__"  # Transformers 5 writes infinities and NaN with this key


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json; raises `UserError` as `read_bounded` and `without_quantization` do. For a
    model in a format that is decoded, return the decoded model's config."""
    return without_quantization(read_bounded(path), path)


def read_bounded(
    path: Path, *, constant: Callable[[str], Any] = lambda x: {INFINITE: x}
) -> dict[str, Any]:
    """Read any config.json, with sizes in bounds; constant: makes infinities and NaN of their JSON
    names. Raises `UserError` if it is no JSON object, or a size is beyond `LARGEST_SIZES`."""

    def checked(content: dict[str, Any]) -> dict[str, Any]:
        check_bounds(content, path)
        return content

    try:
        text = read_input(path, most_bytes=MAX_CONFIG_BYTES)
        config = json.loads(text, object_hook=checked, parse_constant=constant)
    except UserError:  # a ValueError too
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}). Check model.source.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is no JSON object: it describes no model. Check model.source.")
    return config


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON file beside a model's config.json."""
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}). Check model.source.") from None
    return settings


def with_infinities(content: Any) -> Any:
    """Return a config.json with floats in place of Transformers' `{"__float__": ...}`."""
    if isinstance(content, dict):
        if content.keys() == {INFINITE}:
            return float(content[INFINITE])
        return {key: with_infinities(value) for key, value in content.items()}
    if isinstance(content, list):
        return [with_infinities(value) for value in content]
    return content


def check_bounds(content: Mapping[str, Any], path: Path) -> None:
    """Raise `UserError` if a size is beyond `LARGEST_SIZES`."""
    for key in content.keys() & LARGEST_SIZES.keys():
        value = with_infinities(content[key])
        if isinstance(value, int | float) and value > LARGEST_SIZES[key]:
            shown = str(value)
            shown = shown if len(shown) <= SHOWN_DIGITS else f"{shown[:SHOWN_DIGITS]}..."
            raise UserError(
                f"{path}: {key} = {shown}: must be at most {LARGEST_SIZES[key]:,}. "
                "Give the config.json that belongs to the checkpoint (model.source)."
            )


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a multimodal model's decoder, or the config itself."""
    part = config.get(TEXT_PART)
    return part if isinstance(part, dict) else config
