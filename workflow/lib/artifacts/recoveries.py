"""Recovery adapters: the original in 16 bits teaches its own NF4 base (`quantize.recovery_steps`).

Such an adapter is an ordinary, unnamed run of the objective `distill`: its own tokens, the
original's scores, training, export. The runs on its base start from it. Its name is made of
everything that it depends on, so runs with equal recoveries share one. A run that starts from
another run has the recovery of that one."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from workflow.lib.artifacts import layout
from workflow.lib.model.architecture.config_file import read_bounded
from workflow.lib.model.architecture.model_files import CONFIG
from workflow.lib.model.architecture.quantization_settings import quantization_of
from workflow.lib.settings.config import DataConfig, LoraSettings, RunConfig, TrainConfig
from workflow.lib.system.errors import as_yaml, setting_error

# Measured on SmolLM2-135M-Instruct (docs/results.md).
SEQ_LEN, LEARNING_RATE, WARMUP_SHARE, MIN_LR_SHARE = 256, 1e-3, 0.1, 0.1
IN_4_BITS = "load_in_4bit"


def with_recoveries(runs: Mapping[str, RunConfig]) -> dict[str, RunConfig]:
    """Return the runs, those with a recovery starting from it, and the recoveries. Raises
    `UserError` for settings that are not possible with one."""
    found: dict[str, RunConfig] = {}
    recoveries: dict[str, RunConfig] = {}
    for name, run in runs.items():
        start = run.train.start_from
        if run.quantize.recovery_steps:
            for bound, change in _faults(run, runs):
                steps = run.quantize.recovery_steps
                raise setting_error(f"quantize.recovery_steps (run {name})", steps, bound, change)
        if run.quantize.recovery_steps and start is None:
            recovery = _recovery(run)
            start = f"recovery-{run.model.name[:40]}-{layout.fingerprint(recovery)}"
            recoveries.setdefault(start, recovery)
        train = run.train.model_copy(update={"start_from": start})
        found[name] = run.model_copy(update={"train": train})
    return found | recoveries


def _faults(run: RunConfig, others: Collection[str]) -> Iterator[tuple[str, str]]:
    start, config = run.train.start_from, Path(layout.model_dir(run)) / CONFIG
    if start is not None and start not in others:
        yield (
            f"train.start_from = {start!r} names an adapter from elsewhere, which was trained on a "
            "base without recovery",
            "Set one of the two to nothing (0, null), or let the run start from another run",
        )
    for key, value in run.beside_lora.items():
        if value:
            yield (
                "the original in 16 bits takes the trained adapter without its recovery, and with "
                f"{key} = {as_yaml(value)} that difference is no adapter",
                f"Set it to 0, or {key} to its default",
            )
    if config.is_file() and (quantization_of(read_bounded(config), config) or {}).get(IN_4_BITS):
        yield (
            f"model.source = {run.model.source!r} is in NF4 already, so nothing can teach its base",
            "Set it to 0, or model.source to the original bf16, fp16 or fp32 checkpoint",
        )


def _recovery(run: RunConfig) -> RunConfig:
    """Return the run that trains the recovery adapter of a run's base: with the shape of its
    adapter, its batch, which its processes can share, and its plan."""
    off = {"recovery_steps": 0, "recovery_text": None}
    recovery = RunConfig(
        model=run.model.model_copy(update={"attention_dropout": 0}),
        data=DataConfig.model_validate(_data(run)),
        quantize=run.quantize.model_copy(update=off),
        lora=run.lora.model_copy(update={"dropout": LoraSettings().dropout}),
        train=TrainConfig.model_validate(_train(run)),
        hardware=run.hardware,
        evaluate=run.evaluate.model_copy(update={"tasks": (), "tasks_dir": None}),
        tracking=run.tracking,
    )
    return recovery.recovering(run)


def _data(run: RunConfig) -> dict[str, Any]:
    return {
        "name": "recovery",
        "train": run.quantize.recovery_text,
        "heldout": None,
        "loss_on": "all",
        "overlong": "split",
        "near_duplicates": "keep",
        "special_tokens_in_text": "text",
        "seq_len": min(SEQ_LEN, run.data.seq_len),
    }


def _train(run: RunConfig) -> dict[str, Any]:
    section = run.train
    plan = [
        key for key in type(section).model_fields if section.affected_by(key).effect != "result"
    ]
    return {key: getattr(section, key) for key in (*plan, "global_batch_size")} | {
        "objective": "distill",
        "epochs": None,
        "max_steps": run.quantize.recovery_steps,
        "learning_rate": LEARNING_RATE,
        "warmup_share": WARMUP_SHARE,
        "min_lr_share": MIN_LR_SHARE,
    }
