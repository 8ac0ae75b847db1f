"""Keys of other trainers whose meaning here is not just another name."""

import math
import re
from typing import Any

from workflow.importing.datasets import read_datasets
from workflow.importing.draft import Draft, label
from workflow.importing.reading import Source
from workflow.lib.settings.objectives import NEEDS

NAMES = re.compile(r"[\w.,\s-]+")
WHOLE = ("embed_tokens", "lm_head")
# Trackers' settings of a project, there and here.
TRACKERS = {
    "wandb": ("wandb_project", "wandb_project"),
    "mlflow": ("mlflow_experiment", "mlflow_experiment_name"),
    "trackio": ("trackio_project", "project"),
}
CYCLES, FALLING = "lr_scheduler_kwargs.num_cycles", "lr_scheduler_kwargs.num_decay_steps"
# Keys of only one TRL training, for files that do not name their command.
TELLING = {
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
    "simpo_gamma": "simpo",
    "beta": "dpo",
    "precompute_ref_log_probs": "dpo",
}


def translate(source: Source, *, gpus: int | None) -> Draft:
    """Return the settings of a file; gpus: None if unknown. Raises `UserError` for values of a
    wrong type."""
    draft = Draft(source, gpus=gpus)
    for rule in (_objective, _base, _adapter, _length, _schedule, _while_training, read_datasets):
        rule(draft)
    draft.follow_tables()
    draft.put("model.name", label(str(draft.get("model_name_or_path"))))
    return draft


def _objective(draft: Draft) -> None:
    name: Any = draft.get("objective") or "sft"
    telling = [key for key in TELLING if draft.source.trainer == "trl" and draft.has(key)]
    if telling:
        name = TELLING[telling[0]]
    losses = draft.get("loss_type")
    loss = losses[0] if isinstance(losses, list) and len(losses) == 1 else losses
    if name in ("dpo", "cpo") and loss in ("ipo", "orpo", "simpo"):
        name = loss
    name = {"pt": "sft"}.get(name, name)
    # Rewards are programs: no key of a config says them.
    objectives = [entry for entry, needs in NEEDS.items() if needs.examples != "groups"]
    if name not in objectives:
        draft.refuse("objective", f"trained are {', '.join(objectives)}")
        return
    draft.objective = name
    how = f"as {telling[0]} is given" if telling else ""
    draft.put("train.objective", name, "objective", how=how)
    if name == loss:
        draft.note("taken", ["loss_type"], f"train.objective = {name!r}")
    elif loss is not None and name != "sft":
        draft.put("preferences.loss_type", loss, "loss_type")
    beta = "orpo_alpha" if draft.has("orpo_alpha") else "beta"
    draft.put("preferences.beta", draft.number(beta), beta)


def _base(draft: Draft) -> None:
    kind, bits = draft.get("adapter"), draft.get("quantization_bit")
    if kind in (None, False, "full"):
        why = "all weights would be trained; here an adapter (LoRA) is, on a frozen base"
        draft.refuse("adapter", why)
    elif kind not in ("lora", "qlora", True):
        draft.refuse("adapter", "LoRA's adapters alone are trained")
    keys = ("adapter", "load_in_4bit", "load_in_8bit", "quantization_bit")
    in_8bit = draft.get("load_in_8bit") is True or bits == 8
    if draft.get("load_in_4bit") is True or bits == 4:
        draft.note("taken", keys, "LoRA on a base in NF4")
        draft.put("quantize.double_quant", draft.get("use_double_quant"), "use_double_quant")
    elif in_8bit:
        how = "LoRA on a base in NF4 (4 bits), not in 8; `evaluate` compares"
        draft.note("changed", keys, how)
    else:
        draft.put("quantize.method", "none", *keys)


def _adapter(draft: Draft) -> None:
    targets = draft.get("lora_target_modules")
    whole_modules = draft.texts("modules_to_save")
    keys, how = ("lora_target_linear", "lora_target_modules"), ""
    if draft.get("lora_target_linear") or targets in (None, "all", "all-linear"):
        both_given = "lora_target_linear takes all" if draft.has("lora_target_modules") else ""
        less = "PEFT's own choice has fewer, mostly q_proj and v_proj"
        how = "" if targets in ("all", "all-linear") else both_given
        if not draft.get("lora_target_linear") and targets is None:
            how = less
        targets = "all-linear"
    elif not isinstance(targets, str) or NAMES.fullmatch(targets):
        names = draft.texts("lora_target_modules")
        targets = [name for name in names if name not in WHOLE]
        if names != targets:
            how = "lora.modules_to_save trains embed_tokens and lm_head whole"
            whole_modules += [name for name in names if name in WHOLE]
    draft.put("lora.target_modules", targets, *keys, how=how)
    if whole_modules:
        draft.put("lora.modules_to_save", list(dict.fromkeys(whole_modules)))
        draft.note("taken", ["modules_to_save"], f"lora.modules_to_save = {whole_modules!r}")
    if tokens := draft.texts("add_tokens"):
        draft.put("model.add_tokens", tokens, "add_tokens")
    if draft.get("lora_alpha") == "twice the rank":
        draft.put("lora.alpha", 2 * draft.number("lora_r"), "lora_alpha")


def _length(draft: Draft) -> None:
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps", "batch_size")
    rows, accumulation, batch_rows = (draft.number(key) or 1 for key in keys)
    if not draft.has(keys[1]):
        accumulation = max(accumulation, batch_rows // rows)
    gpus = "1 GPU (--gpus says how many)" if draft.gpus is None else f"{draft.gpus} GPUs"
    how = f"{rows} x {accumulation} of accumulation x {gpus}"
    batch = rows * accumulation * (draft.gpus or 1)
    draft.put("train.global_batch_size", batch, *keys, how=how)
    steps = draft.number("max_steps") or 0
    if steps > 0:
        draft.put("train.max_steps", steps, "max_steps")
        draft.put("train.epochs", None)
        draft.note("without effect", ["num_train_epochs"], "max_steps comes first, as there")
    else:
        draft.put("train.epochs", draft.number("num_train_epochs"), "num_train_epochs")
    if draft.get("max_grad_norm") == 0:
        draft.put("train.max_grad_norm", None, "max_grad_norm", how="0 means no clipping there")


def _schedule(draft: Draft) -> None:
    schedule, steps = draft.get("lr_scheduler_type"), draft.number("warmup_steps") or 0
    share = steps if 0 < steps < 1 else draft.number("warmup_ratio") or 0.0
    keys = ("warmup_ratio", "warmup_steps")
    if schedule == "constant":
        draft.put("train.warmup_share", 0.0, *keys, how="a constant rate has no warm-up there")
    elif steps >= 1:
        draft.put("train.warmup_steps", steps, "warmup_steps")
        draft.note("without effect", ["warmup_ratio"], "warmup_steps comes first, as there")
    else:
        draft.put("train.warmup_share", float(share), *keys)
    if schedule == "cosine_with_restarts":
        draft.put("train.lr_cycles", draft.number(CYCLES), CYCLES)
    total, falling = draft.number("max_steps") or 0, draft.number(FALLING) or 0
    if schedule == "warmup_stable_decay" and falling:
        if total <= 0:
            draft.refuse(FALLING, "train.decay_share is a share of all steps: give max_steps too")
            return
        share = round(min(1.0, falling / total), 6)
        draft.put("train.decay_share", share, FALLING, how=f"{falling} of {total} steps")


def _steps_between(draft: Draft, key: str) -> int:
    """Return a number of steps between events, 0 without one; below 1 it is a share of all."""
    every, total = draft.number(key) or 0, draft.number("max_steps") or 0
    if 0 < every < 1 and total <= 0:
        draft.refuse(key, "a share of all steps: give steps, or max_steps too")
        return 0
    return math.ceil(every * total) if every < 1 else int(every)


def _while_training(draft: Draft) -> None:
    saving, every = draft.get("save_strategy"), _steps_between(draft, "save_steps")
    measuring, steps = draft.get("eval_strategy"), _steps_between(draft, "eval_steps")
    if measuring in (None, "steps") and steps >= 1:
        draft.put("train.evaluate_every_steps", steps, "eval_steps", "eval_strategy")
        if draft.get("load_best_model_at_end") or saving == "best":
            draft.put("train.select", "best", "load_best_model_at_end")
        for key in ("early_stopping_patience", "early_stopping_steps"):
            if draft.number(key):
                draft.put("train.early_stopping_patience", draft.number(key), key)
    if saving in (None, "steps") and every >= 1:
        draft.put("train.checkpoint_every_steps", every, "save_steps", "save_strategy")
    if logged := _steps_between(draft, "logging_steps"):
        draft.put("train.log_every_steps", logged, "logging_steps")
    for tracker, (setting, key) in TRACKERS.items():
        if tracker in draft.texts("report_to") or draft.get(f"use_{tracker}"):
            project = draft.get(key) or "huggingface"
            draft.put(f"tracking.{setting}", project, "report_to", key, f"use_{tracker}")
    for key in ("chat_template_jinja", "chat_template", "template"):
        if str(draft.get(key)).endswith((".jinja", ".jinja2")):
            draft.put("data.chat_template", draft.get(key), key)
    if draft.has("enable_thinking"):
        switch = {"enable_thinking": draft.get("enable_thinking")}
        draft.put("data.template_kwargs", switch, "enable_thinking")
