"""Linears of a model that can have an adapter; their weights are frozen, in NF4 or in 16 bits."""

import re
from collections.abc import Collection, Iterable, Mapping

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.checkpoints.decoder_layers import expert_stacks, other_parts, routers
from workflow.lib.model.layers.weight_storage import NF4Spec, PlainSpec, WeightStorage

# The last name alone may also match other modules (`proj`, a router of Gemma 4).
BEFORE_LAYER = re.compile(r"\.\d+\.")
# Attributes of a model, and of a module with a weight of that name.
WITHOUT_ADAPTER, KEPT = "workflow_modules_without_adapter", "_in_16_bits"


def takes_adapter(model: PreTrainedModel, path: str) -> bool:
    """Whether PEFT puts an adapter on the linear at `path`, and NF4 holds it. Two kinds stay in 16
    bits without one: linears that a family's fused kernels read past the layer's forward (Mamba's
    `out_proj`), and linears that Transformers quantizes in no model of the family (the weights of
    an indexer's heads)."""
    if path.endswith(tuple(model._keep_in_fp32_modules or ())):
        return False
    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, path.rpartition(".")[2])
    except ValueError:
        return False
    return True


def adaptable_linears(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return path and shape (out_features, in_features) of a causal LM's adaptable linears."""
    head, others = model.get_output_embeddings(), tuple(f"{path}." for path in other_parts(model))
    choosing = routers(model)
    return {
        path: (module.out_features, module.in_features)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and path not in choosing
        and not f"{path}.".startswith(others)
        and takes_adapter(model, path)
    }


def weight_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of adaptable linears (out, in) and of stacks (experts, out, in), by
    path."""
    stacks = {path: stack.shape for path, stack in expert_stacks(model).items()}
    return {**adaptable_linears(model), **stacks}


def weight_specs(
    model: PreTrainedModel, quantized: Mapping[str, NF4Spec], *, dtype: torch.dtype
) -> dict[str, WeightStorage]:
    """Return the storage of all these weights of a meta model: those of `quantized` as they are,
    others in 16 bits (`dtype`)."""
    specs: dict[str, WeightStorage] = {
        path: PlainSpec(shape, dtype) for path, shape in adaptable_linears(model).items()
    }
    for path, stack in expert_stacks(model).items():
        experts, rows, columns = stack.shape
        specs[path] = PlainSpec((experts * rows, columns), dtype, experts, stack.transposed)
    return {**specs, **quantized}


def mark_kept_(model: PreTrainedModel, paths: Iterable[str]) -> None:
    """Mark weights of a meta model that stay in 16 bits; layers may be renumbered afterwards."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), f"{name}{KEPT}", True)


def nf4_specs(model: PreTrainedModel, *, block_size: int, double_quant: bool) -> dict[str, NF4Spec]:
    """Return the storage in NF4 of all weights that are not marked, without offsets of scales."""
    specs = {}
    for path, (*experts, rows, columns) in weight_shapes(model).items():
        parent, _, name = path.rpartition(".")
        if not getattr(model.get_submodule(parent), f"{name}{KEPT}", False):
            count = experts[0] if experts else 1
            shape = (count * rows, columns)
            specs[path] = NF4Spec(shape, block_size, double_quant, offset=0.0, experts=count)
    return specs


def modules_without_adapter(model: PreTrainedModel) -> list[str]:
    """Return paths, or ends of paths, of other linears; none for the output head alone."""
    others, choosing = other_parts(model), routers(model)
    refused = {
        BEFORE_LAYER.split(path, maxsplit=1)[-1]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and (path in choosing or not takes_adapter(model, path))
    }
    if not others and not refused:
        return []
    return [*others, *sorted(refused), *head_paths(model)]


def head_paths(model: PreTrainedModel) -> list[str]:
    """Return the path of the output head."""
    head = model.get_output_embeddings()
    return [path for path, module in model.named_modules() if module is head]


def skipped_modules(model: PreTrainedModel, kept: Collection[str]) -> list[str]:
    """Return Transformers' `llm_int8_skip_modules` of a base with these weights in 16 bits; empty
    for the output head alone."""
    skipped, linears = modules_without_adapter(model), adaptable_linears(model)
    own = sorted(path for path in kept if path in linears)
    return [*(skipped or (head_paths(model) if own else [])), *own]


def note_without_adapter_(model: PreTrainedModel) -> None:
    """Note the modules without adapter on a model whose other parts are removed later."""
    setattr(model, WITHOUT_ADAPTER, modules_without_adapter(model))


def excluded_pattern(model: PreTrainedModel) -> str | None:
    """Return PEFT's pattern for modules without adapter, as noted; None for the head alone."""
    paths = [re.escape(path) for path in getattr(model, WITHOUT_ADAPTER, ())]
    return rf"(.*\.)?({'|'.join(paths)})(\..*)?" if paths else None
