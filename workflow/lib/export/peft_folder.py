"""An adapter as the folder that PEFT, Transformers and servers load: weights, configuration,
tokenizer with its chat template, generation settings, checksums."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workflow.lib.artifacts.manifest_record import ConversationFacts
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export.adapter_files import (
    base_reference,
    check_conversations,
    save_adapter,
    save_tokenizer,
    with_corrections,
    write_generation_config,
)
from workflow.lib.export.packed_stacks import adapted_paths, exported_config
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
    model: Checkpoint,
    base: Checkpoint,
    facts: ConversationFacts,
) -> Adapter:
    """Write the adapter of `base` to `folder`. Raises `UserError` if its tokenizer does not write
    conversations as trained."""
    reference = base_reference(config.model, model.folder, export=config.export)
    whole = Trained(trained.tensors, trained.config | reference)
    save_exported(whole, folder, original=model, base=base)
    save_tokenizer(model.folder, folder, facts=facts)
    write_generation_config(model, folder, facts=facts)
    check_conversations(folder, facts.probes)
    write_checksums(folder)
    return Adapter(folder)


def save_exported(
    adapter: Trained,
    folder: Path,
    *,
    original: Checkpoint,
    base: Checkpoint,
) -> None:
    """Write weights and configuration for stock PEFT."""
    names = original.names.peft(adapted_paths(adapter.tensors))
    with base.stored() as reader:
        tensors = with_corrections(
            adapter.tensors, adapter.config, model=original.model, base=reader
        )
        save_adapter(
            {names.exported(name): tensor for name, tensor in tensors.items()},
            exported_config(adapter.config, original.names, adapter.tensors),
            folder,
        )
