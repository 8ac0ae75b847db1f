"""PEFT's `adapter_config.json` as settings, for a run that continues an adapter.

A key is a setting, has no effect on the adapter (`FREE`), or is empty; any other key is an error,
also one of a newer PEFT. Rules read from PEFT 0.21, `LoraConfig` and `check_target_module_exists`.
Imports no torch, so settings are compared with an adapter before its base is quantized."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workflow.lib.checkpoints.files.config_file import MAX_CONFIG_BYTES
from workflow.lib.checkpoints.files.model_files import ADAPTER, ADAPTER_WEIGHTS
from workflow.lib.checkpoints.files.safetensors_headers import read_headers
from workflow.lib.checkpoints.files.stack_names import stack_settings
from workflow.lib.settings.config import LoraSettings, RunConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.input_files import read_input

MERGE = (
    "Merge the adapter into its base (PEFT's merge_and_unload, then save_pretrained of model and "
    "tokenizer), name that folder as model.source, and remove train.start_from"
)
CONVERT = (
    "Save it once more with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion), "
    "which makes it an adapter of the original weights"
)
# Values of plain LoRA on the weights of the base.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
ROWS = "trainable_token_indices"
# Keys on how the adapter was made and where its base lies, without meaning for linears of
# Transformers (`fan_in_fan_out`, which PEFT resets on them), or compared with the model when it is
# loaded (`trainable_token_indices`, in `start_adapter`).
FREE = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    ROWS,
}
USED = {
    "r": "r",
    "lora_alpha": "alpha",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "modules_to_save": "modules_to_save",
}
TARGETS = {"target_modules", "target_parameters", "exclude_modules", "layers_to_transform"}
COMPARED = ("target_modules", *USED.values())
UNORDERED = ("target_modules", "modules_to_save")


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return a folder's `adapter_config.json`, of stacks if its file has experts one by one; raises
    `UserError` if it describes no adapter."""
    path = folder / ADAPTER
    try:
        config = json.loads(read_input(path, most_bytes=MAX_CONFIG_BYTES))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read as JSON ({error}). Copy the adapter anew."
        ) from None
    if not isinstance(config, dict) or "peft_type" not in config:
        raise UserError(f"{path} describes no PEFT adapter. Check train.start_from.")
    weights = folder / ADAPTER_WEIGHTS
    return stack_settings(config, read_headers([weights])) if weights.is_file() else config


def adapter_settings(config: Mapping[str, Any], source: object) -> LoraSettings:
    """Return an adapter's `lora` settings without dropout; raises `UserError` naming `source`."""
    for key, value in config.items():
        if key in PLAIN:
            refused = value not in PLAIN[key]
        else:
            refused = bool(value) and key not in {*FREE, *USED, *TARGETS}
        if refused:
            changes_base = key == "init_lora_weights"
            why = (
                "it belongs to weights that PEFT changed when the adapter was made"
                if changes_base
                else "only LoRA adapters without it can be continued"
            )
            change = CONVERT if changes_base else MERGE
            raise UserError(f"{source}: {key} = {value!r} in {ADAPTER}: {why}. {change}.")
    settings = {
        setting: config[key] for key, setting in USED.items() if config.get(key) is not None
    }
    try:
        targets = _targets(config)
        return LoraSettings.model_validate({"target_modules": targets, **settings})
    except (ValidationError, TypeError, re.error) as error:
        raise UserError(f"{source}: {ADAPTER} cannot be continued ({error}). {MERGE}.") from None


def _targets(config: Mapping[str, Any]) -> list[str] | str:
    """Return the adapted linears as `lora.target_modules`: names, or one expression."""
    modules, layers = config.get("target_modules") or [], config.get("layers_to_transform")
    excluded = config.get("exclude_modules") or []
    # a weight of a linear, or of all experts
    parameters = [name.removesuffix(".weight") for name in config.get("target_parameters") or ()]
    if not isinstance(modules, str):
        modules = sorted(modules)
        if layers in (None, []) and not excluded:
            return modules + parameters
    if modules == "all-linear" and not (parameters or excluded):
        return "all-linear"
    expression = _expression(modules)
    if layers not in (None, []) and not isinstance(modules, str):
        numbers = "|".join(map(str, layers if isinstance(layers, list) else [layers]))
        named = config.get("layers_pattern") or [r"[^.]*"]
        pattern = "|".join([named] if isinstance(named, str) else named)
        expression = rf"(?=(?:.*?\.)?(?:{pattern})\.(?:{numbers})\.){expression}"
    if excluded:
        expression = f"(?!{_expression(excluded)}$){expression}"
    return f"{expression}|{_expression(parameters)}" if parameters else expression


def _expression(targets: list[str] | str) -> str:
    """Return a regular expression of whole paths for PEFT's names or its own expression."""
    if targets == "all-linear":
        return ".*"
    if isinstance(targets, str):
        return f"(?:{targets})"
    return rf"(?:.*\.)?(?:{'|'.join(map(re.escape, targets))})"


def continued(
    lora: LoraSettings,
    adapter: LoraSettings,
    *,
    run: str,
    start: str,
    follow: bool,
    beside: Mapping[str, tuple[object, object]],
) -> LoraSettings:
    """Return a run's `lora` settings: those of the adapter that it starts from, with its own
    dropout. follow: whether default values follow the adapter. beside: other settings, by name:
    (the run's value, the adapter's). Raises `UserError` with all that differ."""
    default, differing = LoraSettings(), dict(beside)
    for key in COMPARED:
        own, its = getattr(lora, key), getattr(adapter, key)
        followed = follow and own == getattr(default, key)
        if not followed and not _same(key, own, its):
            differing[f"lora.{key}"] = own, its
    if differing:
        lines = "".join(
            f"\n  {name} = {_shown(own)}: set it to {_shown(its)}"
            for name, (own, its) in differing.items()
        )
        raise UserError(
            f"run {run}: train.start_from = {start!r}: an adapter is continued as it is, and these "
            f"settings differ from it:{lines}\nOr set train.start_from to null for a new adapter."
        )
    return adapter.model_copy(update={"dropout": lora.dropout})


def check_continued(checks: Mapping[str, Any], folder: Path, start: str) -> None:
    """Raise `UserError` unless `layout.model_checks`'s runs have the adapter's `lora` settings and
    train rows of tokens as it does."""
    config = read_adapter_config(folder)
    settings = adapter_settings(config, start)
    for name, run in checks.get("runs", {}).items():
        run_settings = RunConfig.model_validate(run)
        check_rows(config, run_settings, run=name)
        continued(run_settings.lora, settings, run=name, start=start, follow=False, beside={})


def check_rows(config: Mapping[str, Any], settings: RunConfig, *, run: str) -> None:
    """Raise `UserError` if of a run and the adapter that it continues only one has trained rows of
    tokens; which rows these are, the training compares."""
    rows, added = config.get(ROWS) or None, [*settings.model.add_tokens]
    if bool(rows) != bool(added):
        raise UserError(
            f"run {run}: train.start_from = {settings.train.start_from!r}: its {ROWS} are {rows}, "
            f"and model.add_tokens = {added}. Set model.add_tokens to the tokens that were added "
            f"for it. Rows of other tokens cannot be continued. {MERGE}."
        )


def _same(key: str, one: Any, other: Any) -> bool:
    if key in UNORDERED and isinstance(one, tuple) and isinstance(other, tuple):
        return {*one} == {*other}
    return bool(one == other)


def _shown(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
