"""The config.json of a model whose rotary positions are scaled (`model.rope_scaling`)."""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from workflow.lib.checkpoints.files.config_file import text_part, with_infinities
from workflow.lib.settings.train import RopeScaling
from workflow.lib.system.errors import UserError, setting_error

FULL_ATTENTION = "full_attention"
ORIGINAL, CONTEXT = "original_max_position_embeddings", "max_position_embeddings"
# Methods that another one replaces; others are of a family.
REPLACED = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
KEYS = {"type", "short_factor", "long_factor", "attention_factor"} | {*RopeScaling.model_fields}


def with_scaling(config: Mapping[str, Any], scaling: RopeScaling) -> dict[str, Any]:
    """Return a config.json with other rotary positions and their context. Layers of sliding
    windows, where they have parameters of their own, keep these: a window is no longer than before.

    Raises `UserError` for a model without rotary positions that Transformers scales, or a context
    that is not longer than the model's own."""
    text: Any = _parsed(config).get_text_config()
    parameters = copy.deepcopy(getattr(text, "rope_parameters", None) or {})
    own = parameters.get(FULL_ATTENTION, parameters)
    if (kind := own.get("rope_type")) not in REPLACED:
        kinds = f"of a kind of its own ({kind})" if kind else "not of one kind"
        raise not_scaled(scaling, f"{text.model_type} has rotary positions {kinds}, or none")
    own_context = text.max_position_embeddings
    original = scaling.original_max_position_embeddings or _unscaled_context(own, own_context)
    context = scaling.context(original)
    if context <= own_context:
        reason = f"{original} tokens x factor must be above the model's {CONTEXT} = {own_context}"
        change = f"Set it above {own_context / original:g}"
        raise _error("factor", scaling.factor, reason, change)
    scaled = {key: value for key, value in own.items() if key not in KEYS} | scaling.parameters
    if scaling.rope_type != "linear":
        scaled[ORIGINAL] = original
    several = own is not parameters
    copied = copy.deepcopy(dict(config))
    part = text_part(copied)
    part.pop("rope_scaling", None)  # an older name of the parameters
    part["rope_parameters"] = parameters | {FULL_ATTENTION: scaled} if several else scaled
    part[CONTEXT] = context
    try:
        _parsed(copied)
    except (KeyError, TypeError, ValueError) as error:
        message = str(error).strip().splitlines()[-1].strip()
        raise not_scaled(scaling, f"{text.model_type} does not take it ({message})") from None
    return copied


def _parsed(config: Mapping[str, Any]) -> PretrainedConfig:
    kind = CONFIG_MAPPING[config["model_type"]]
    return kind.from_dict(copy.deepcopy(with_infinities(dict(config))))


def scaled_context(config: Mapping[str, Any], scaling: RopeScaling) -> int:
    """Return the context in tokens of a model with this config.json, once it is scaled; raises as
    `with_scaling`."""
    return int(text_part(with_scaling(config, scaling))[CONTEXT])


def _unscaled_context(own: Mapping[str, Any], context: int) -> int:
    """Return the context of a model without its own scaling."""
    if own["rope_type"] in ("default", "dynamic"):
        return context
    return round(context / own["factor"]) if own["rope_type"] == "linear" else int(own[ORIGINAL])


def not_scaled(scaling: RopeScaling, reason: str) -> UserError:
    """Return the refusal of a model whose positions cannot be scaled."""
    return _error("rope_type", scaling.rope_type, reason, "Remove model.rope_scaling")


def _error(key: str, value: object, reason: str, change: str) -> UserError:
    return setting_error(f"model.rope_scaling.{key}", value, reason, change)
