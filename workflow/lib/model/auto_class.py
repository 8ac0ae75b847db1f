"""Which of Transformers' auto classes builds a model, by Transformers' own tables.

A multimodal model is built whole, with all that its text never passes, so that its modules have the
names of the published checkpoint and an adapter fits the model that anyone loads."""

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
)
from transformers.models.auto import modeling_auto

# In the order in which they are asked: some multimodal models have a text class of their own.
TABLES: dict[type[Any], dict[str, Any]] = {
    AutoModelForCausalLM: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForImageTextToText: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    AutoModelForMultimodalLM: modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}


def is_built(config: PretrainedConfig) -> bool:
    """Tell whether an auto class builds the model of a configuration."""
    return any(config.model_type in table for table in TABLES.values())


def auto_class(config: PretrainedConfig) -> type[Any]:
    """Return the auto class of a configuration; without one, that of causal LMs, which says so."""
    found = (one for one, table in TABLES.items() if config.model_type in table)
    return next(found, AutoModelForCausalLM)
