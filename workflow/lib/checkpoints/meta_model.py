"""The class of a model without memory (on torch's meta device), by Transformers' own tables.

A multimodal model is built whole, with parts that text never passes: so its modules have the names
of the published checkpoint, and an adapter fits the model that anyone loads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto
from transformers.utils import logging as transformers_logging

from workflow.lib.checkpoints.files.attention_needs import ATTENTION_DROPOUT

SHOWN = 300  # characters of an error of Transformers
# In order of precedence: some multimodal models have a text class of their own.
TABLES: dict[type[Any], dict[str, Any]] = {
    AutoModelForCausalLM: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForImageTextToText: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    AutoModelForMultimodalLM: modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}


def is_built(config: PretrainedConfig) -> bool:
    """Tell whether an auto class builds the model of a configuration."""
    return any(config.model_type in table for table in TABLES.values())


def auto_class(config: PretrainedConfig) -> type[Any]:
    """Return the auto class of a configuration; without one that of causal LMs, which raises."""
    classes = (one for one, table in TABLES.items() if config.model_type in table)
    return next(classes, AutoModelForCausalLM)


def return_states_alone_(config: PretrainedConfig) -> None:
    """Make a model return only its last states, by name, whatever its config asks for."""
    for part in (config, config.get_text_config()):
        part.return_dict, part.output_attentions, part.output_hidden_states = True, False, False


def drop_no_attention_(config: PretrainedConfig) -> None:
    """Turn off dropout of attention weights in training."""
    for part in (config, config.get_text_config()):
        for name in {*ATTENTION_DROPOUT} & {*part.to_dict()}:
            setattr(part, name, 0.0)


def build_config_on_meta(
    config: PretrainedConfig, *, dtype: torch.dtype, attention: str = "eager"
) -> PreTrainedModel:
    """Build the causal LM of a configuration without memory; raises Transformers' errors."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide Transformers' progress bars and its advice on published settings."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def said_by(error: Exception) -> str:
    """Return an error of Transformers in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:SHOWN]}"


def is_tied(model: PreTrainedModel) -> bool:
    """Tell whether embedding and head of a built model are one tensor."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    return head is not None and head.weight is embedding.weight
