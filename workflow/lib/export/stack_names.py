"""An adapter on stacks of experts as PEFT has it: `target_parameters`, and the nested wrappers of
`architecture.stack_names`.

PEFT takes the names of a mixture's target modules for those of Transformers 4, in which every
expert was a module: of Qwen's family, `gate_proj` of a dense layer or a shared expert would mean
the stacks. Linears of such names are exported as `target_parameters` too, by their weight."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.model.architecture.adapter_targets import by_pattern
from workflow.lib.model.architecture.stack_names import PREFIX, StackNames
from workflow.lib.model.layers.expert_stacks import expert_stacks
from workflow.lib.model.published.converted_reader import ModuleNames, is_by_expert


def adapted_paths(adapter: Iterable[str]) -> set[str]:
    """Return the paths of all linears and stacks that have an adapter, by names in training."""
    suffix = ".lora_A.weight"
    return {
        name.removeprefix(PREFIX).removesuffix(suffix) for name in adapter if name.endswith(suffix)
    }


def without_stacks(
    adapter: Mapping[str, torch.Tensor], stacks: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter, by names in training, that belong to no stack."""
    paths = {f"{PREFIX}{path}" for path in stacks}
    return {
        name: tensor for name, tensor in adapter.items() if name.partition(".lora_")[0] not in paths
    }


def exported_names(model: PreTrainedModel, adapter: Iterable[str]) -> StackNames:
    """Return the names of an adapter, given those in training. model: the original on meta."""
    adapted = adapted_paths(adapter)
    return StackNames(path for path in expert_stacks(model) if path in adapted)


def stored_names(config: Mapping[str, Any]) -> StackNames:
    """Return the names of an exported adapter, given its `adapter_config.json`."""
    parameters: Iterable[str] = config.get("target_parameters") or ()
    return StackNames(path for path in parameters if not path.endswith(".weight"))


def trained_targets(config: Mapping[str, Any]) -> list[str] | str:
    """Return what an exported adapter is on as modules of the training, given the same."""
    modules = config["target_modules"]
    parameters: Iterable[str] = config.get("target_parameters") or ()
    paths = [path.removesuffix(".weight") for path in parameters]
    return [*modules, *paths] if paths else modules


def exported_config(
    config: Mapping[str, Any], model: PreTrainedModel, adapter: Iterable[str]
) -> dict[str, Any]:
    """Return the content of `adapter_config.json` by which stock PEFT builds the adapter. config:
    of the training; adapter: names in training. That of a family without experts stays."""
    stacks = expert_stacks(model)
    if not names_of_experts(model) and not stacks:  # of a mixture all layers may be dense
        return dict(config)
    adapted = adapted_paths(adapter)
    linears = adapted - stacks.keys()
    taken = sorted(path for path in linears if path.rpartition(".")[2] in names_of_experts(model))
    weights = {path: f"{path}.weight" for path in taken}
    parameters = [*(path for path in stacks if path in adapted), *weights.values()]
    exported = dict(config) | {
        "target_modules": _targets(linears - weights.keys(), model),
        "exclude_modules": None,
    }
    if not parameters:
        return exported
    return exported | {
        "target_parameters": parameters,
        "lora_dropout": 0.0,  # PEFT has none for parameters, and it acts in training alone
        "rank_pattern": _with_weights(config["rank_pattern"], weights),
        "alpha_pattern": _with_weights(config["alpha_pattern"], weights),
    }


def _targets(paths: set[str], model: PreTrainedModel) -> list[str]:
    """Return the paths, or the name alone where all linears of that name are among them."""
    named: dict[str, set[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            named.setdefault(path.rpartition(".")[2], set()).add(path)
    whole = {name for name, others in named.items() if others <= paths}
    return sorted({name if (name := p.rpartition(".")[2]) in whole else p for p in paths})


def _with_weights(patterns: Mapping[str, Any], weights: Mapping[str, str]) -> dict[str, Any]:
    """Return patterns of paths, with those of parameters that are the weight of such a path."""
    values = {
        re.escape(weight): value
        for path, weight in weights.items()
        if (value := by_pattern(patterns, path)) is not None
    }
    return values | dict(patterns)


def names_of_experts(model: PreTrainedModel) -> set[str]:
    """Return what an expert's projections are called where each is a module (`gate_proj`, `w1`)."""
    return {
        pattern.removesuffix(".weight").rpartition(".")[2]
        for rule in ModuleNames(model).converters
        if is_by_expert(rule)
        for pattern in rule.source_patterns
    }
