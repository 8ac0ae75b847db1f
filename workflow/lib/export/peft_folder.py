"""An adapter as the folder that PEFT, Transformers and servers load: weights, configuration,
tokenizer with its chat template, generation settings, checksums."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from workflow.lib.artifacts.manifest_record import ConversationFacts
from workflow.lib.checkpoints.files.stack_names import StackNames
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.export.adapter_files import (
    base_reference,
    check_conversations,
    save_adapter,
    save_tokenizer,
    with_corrections,
    write_generation_config,
)
from workflow.lib.export.packed_stacks import exported_config, exported_names
from workflow.lib.model.nf4_model import build_on_meta
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.files import write_checksums

logger = logging.getLogger("workflow")


class Trained(NamedTuple):
    """An adapter in the names of the training, and its `adapter_config.json`."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]


def write_peft_folder(
    trained: Trained,
    folder: Path,
    config: RunConfig,
    *,
    model: Path,
    base: Path,
    facts: ConversationFacts,
) -> StackNames:
    """Write the adapter of `base` to `folder`; return the names in its files. Raises `UserError` if
    its tokenizer does not write conversations as trained."""
    adapter_config = trained.config | base_reference(config.model, model, export=config.export)
    original = build_on_meta(model, dtype=torch.bfloat16)
    names = exported_names(original, trained.tensors)
    whole = Trained(trained.tensors, adapter_config)
    with CheckpointReader(base) as reader:
        save_exported(whole, folder, original=original, base=reader)
    save_tokenizer(model, folder, facts=facts)
    write_generation_config(model, folder, facts=facts)
    check_conversations(folder, facts.probes)
    write_checksums(folder)
    return names


def save_exported(
    adapter: Trained,
    folder: Path,
    *,
    original: PreTrainedModel,
    base: CheckpointReader,
) -> None:
    """Write weights and configuration for stock PEFT. original: on meta; base: the trained
    checkpoint."""
    names = exported_names(original, adapter.tensors)
    tensors = with_corrections(adapter.tensors, adapter.config, model=original, base=base)
    save_adapter(
        {names.exported(name): tensor for name, tensor in tensors.items()},
        exported_config(adapter.config, original, adapter.tensors),
        folder,
    )
