"""The weights of a run's start adapter, from any PEFT adapter's file, in the fp32 masters of the
training model.

The values are exactly the file's. Every tensor of it has a place, or the message names it."""

import logging
import re
from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import nn

from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.files.stack_names import PREFIX, StackNames
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.model.experts.expert_matmul import FusedLoraStack
from workflow.lib.model.lora import adapter_config, peft_name, trainable_parameters
from workflow.lib.model.nf4_model import local, local_range
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.errors import setting_error
from workflow.lib.system.number_formats import listed_names

logger = logging.getLogger("workflow")

EXACT = ("F32", "BF16", "F16")  # types whose values fp32 holds
# Parts of names from torch's wrappers, and PEFT's name of an adapter in a raw state.
WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
LAYERS = re.compile(r"\blayers\.\d.*")
OWN_NAME = re.compile(r"\.(lora_A|lora_B|lora_magnitude_vector|modules_to_save)\.default\b")


@torch.no_grad()
def load_start_(
    training: nn.Module, start: Adapter, config: RunConfig, *, base: CheckpointReader
) -> None:
    """Fill this process's slices of all trained tensors from an adapter. Raises `UserError` naming
    the tensors that do not fit."""
    error = partial(setting_error, "train.start_from", config.train.start_from)
    params = _params_by_peft_name(training)
    with start.reader() as reader:
        stored: dict[str, str] = {}
        for name in reader.names():
            if (plain := plain_name(name)) in stored:
                raise error(f"{name} and {stored[plain]} are one tensor", "Remove one of them")
            stored[plain] = name
        stored = names_in_class(stored, params)
        if findings := _findings(reader, stored, params, base):
            raise error(
                f"this adapter does not fit model.source and the section lora: {findings}",
                "Check that model.source is the model that it was trained on, and that "
                "lora.target_modules names what it adapts and lora.modules_to_save what is saved "
                "whole beside it",
            )
        for name, param in params.items():
            rows = reader.rows(stored[name], *local_range(param))
            if not rows.isfinite().all():
                raise error(f"{stored[name]} is not finite", "Name another adapter")
            local(param).copy_(rows)
    settings = start.config
    key = "trainable_token_indices"
    if settings.get(key) != (own_value := adapter_config(training.peft_model)[key]):
        raise error(
            f"its {key} are {settings.get(key)}, those of model.add_tokens {own_value}",
            "Set model.add_tokens to what it was trained with",
        )
    logger.info(
        "starts from the adapter in %s (%d tensors), which gives rank, alpha and targets; trained "
        "before on %s with dropout %s, now on %s with %s",
        *(
            start.folder,
            len(stored),
            settings.get("base_model_name_or_path"),
            settings.get("lora_dropout", 0.0),
        ),
        *(config.model.source, config.lora.dropout),
    )


def plain_name(name: str) -> str:
    """Return PEFT 0.21's name of a tensor, for a file of any writer."""
    name = OWN_NAME.sub(r".\1", WRAPPERS.sub("", name)).replace(".modules_to_save.", ".")
    if ".lora_magnitude_vector" in name:
        name = name.removesuffix(".weight")
    return name if name.startswith(PREFIX) else PREFIX + name


def names_in_class(stored: dict[str, str], model_names: Collection[str]) -> dict[str, str]:
    """Return the stored names by the model's names, where only the part before the layers differs.
    Classes of one model differ so: text alone, or multimodal, in Transformers 4 or 5. Names that
    are ambiguous within the layers do not change."""
    own, stored_parts = (
        {_in_layers(name): name for name in names} for names in (model_names, stored)
    )
    if (
        stored.keys() <= {*model_names}
        or len(own) < len(model_names)
        or len(stored_parts) < len(stored)
    ):
        return stored
    stored_by_name = {own.get(part, name): stored[name] for part, name in stored_parts.items()}
    if moved := next((name for name in stored if name not in stored_by_name), None):
        logger.info("%s and others are found by their layers: the class is another", stored[moved])
    return stored_by_name


def _in_layers(name: str) -> str:
    """Return the part of a name below the decoder (`layers.3.mlp...`, `lm_head.weight`)."""
    match = LAYERS.search(name)
    return match.group() if match else ".".join(name.split(".")[-2:])


def _params_by_peft_name(training: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by their names in PEFT's file."""
    stacks = (path for path, x in training.named_modules() if isinstance(x, FusedLoraStack))
    names = StackNames(peft_name(path).removeprefix(PREFIX) for path in stacks)
    return {names.exported(name): param for name, param in trainable_parameters(training).items()}


def _findings(
    reader: CheckpointReader,
    stored: Mapping[str, str],
    params: Mapping[str, nn.Parameter],
    own: CheckpointReader,
) -> str:
    """Return the missing, unknown and misshapen tensors in words; empty if all fits."""

    def is_base_s(name: str) -> bool:
        """Tell whether PEFT keeps a tensor of the base here: a router's correction beside weights
        that are trained whole, or the tables of tokens (`save_embedding_layers`)."""
        path = name.removeprefix(PREFIX)
        return path in own.names() and reader.equals(stored[name], own, path)

    pairs = [(stored[name], tuple(params[name].shape)) for name in params if name in stored]
    names_by_fault = {
        "nothing is trained in the model at": [
            stored[name] for name in stored if name not in params and not is_base_s(name)
        ],
        "the file lacks": [name for name in params if name not in stored],
        "of another shape": [
            f"{name} {reader.shape(name)}, in the model {shape}"
            for name, shape in pairs
            if reader.shape(name) != shape
        ],
        "of a type that fp32 cannot hold": [
            f"{name} ({reader.dtype(name)})" for name, _ in pairs if reader.dtype(name) not in EXACT
        ],
    }
    return "; ".join(
        f"{what}: {listed_names(names, limit=3)}" for what, names in names_by_fault.items() if names
    )
