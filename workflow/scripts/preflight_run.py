"""Predict memory, disk and time of a run, choose its micro-batch, refuse what cannot fit.

It predicts from shapes alone. In the workflow (with --config) it reads the description of the base
model, the tokens manifest, and this machine. It
writes preflight.json, which `finetune` follows, and prints it as a table. A run that does not fit
ends with exit status 1 and the changes that would make it fit.

By hand (with --gpus) it answers the same for any model on any GPUs, with neither at hand:

  python -m workflow.scripts.preflight_run --model meta-llama/Llama-3.1-70B --gpus 2x4090

The verdict comes from the engine itself: it takes two steps of the chosen plan on tensors without
values, and what it would have asked of a GPU is replayed. That takes 7 to 20 s the first time, and
is kept for the next. With --estimate the plan is not recorded itself: the answer is by lines
between recordings, which are shipped or kept for many models, and takes a second then.
"""

import argparse
import logging
import shutil
from dataclasses import replace
from pathlib import Path

from workflow.lib.evaluation.task_files import check_tasks
from workflow.lib.model.architecture.model_shape import (
    ModelShape,
    read_config,
    read_shape,
)
from workflow.lib.planning.machine import Machine, imagined_machine
from workflow.lib.planning.preflight.checks import check_tokens, read_machine, read_tokens
from workflow.lib.planning.preflight.decision import decide
from workflow.lib.planning.preflight.forecast import forecast
from workflow.lib.planning.preflight.planning_inputs import attention_needs, training_attention
from workflow.lib.planning.preflight.replay_check import Recorder
from workflow.lib.planning.preflight.table import render
from workflow.lib.planning.preflight.what_if import (
    NAME,
    find_config,
    find_shape,
    imagined_tokens,
    settings_of,
)
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.recording.recording_process import plan_recorder
from workflow.lib.settings.config import HardwareConfig, RunConfig
from workflow.lib.system.environment import importing
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import file_sha256, provenance, write_checked_json
from workflow.lib.system.gpu_models import GpuModel, parse_gpus
from workflow.lib.system.units import GIB
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    if args.config is None:
        what_if(args)
        return
    check_arguments(
        args, needed=("tokens", "output", "run"), foreign=("gpus", "estimate", "host_gib")
    )
    settings = RunConfig.model_validate(args.config)
    if not args.brief:  # finetune's own prediction, which only follows this one
        check_tasks(settings.evaluate)
    shape = read_model(Path(args.model), args.description)
    tokens = read_tokens(args.tokens)
    machine = read_machine(settings.hardware)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(args.output.parent).free
    with plan_recorder(read_config(Path(args.model)), shape) as record:
        predict(args, settings, shape, machine, tokens, disk_free_bytes=free, record=record)


def what_if(args: argparse.Namespace) -> None:
    """Predict for a machine and tokens that are only imagined."""
    check_arguments(args, needed=("gpus",), foreign=("tokens",))
    args.run = args.run or NAME
    count, gpu = parse_gpus(args.gpus, setting="--gpus")
    settings = settings_of(
        args.set, seq_len=args.seq_len, rank=args.rank, processes=count, batch=args.batch
    )
    shape = find_shape(args.model, revision=args.revision, describe=described)
    machine = machine_by_hand(count, gpu, asked_gib=args.host_gib, hardware=settings.hardware)
    tokens = imagined_tokens(shape, seq_len=settings.data.seq_len, rows=args.rows)

    config = find_config(args.model, revision=args.revision)
    with plan_recorder(config, shape) as record:
        predict(args, settings, shape, machine, tokens, disk_free_bytes=None, record=record)


def machine_by_hand(
    count: int, gpu: GpuModel, *, asked_gib: float | None, hardware: HardwareConfig
) -> Machine:
    """Return a machine of such GPUs, with the host memory that is asked for, or usual."""
    if asked_gib is not None and not asked_gib > 0:
        raise setting_error("--host-gib", asked_gib, "it must be above 0", "Give the host's GiB")
    origin = "--host-gib" if asked_gib is not None else "hardware.host_memory_gib"
    allowed = hardware.host_memory_gib
    if asked_gib is None and not isinstance(allowed, str):
        asked_gib = allowed
    if asked_gib is None:
        asked_gib = count * gpu.host_gib
        origin = "what machines with such GPUs usually have; --host-gib says how much it is"
    machine = imagined_machine(count, gpu, host_bytes=int(asked_gib * GIB))
    return replace(machine, imagined_host=origin)


def read_model(model: Path, description: Path | None) -> ModelShape:
    """Return a model's description: `model` itself, or that of a folder, made now if it is not
    there or another model's.
    """
    if model.is_file():
        return read_shape(model)
    config = model / "config.json"
    if description is not None and description.is_file():
        shape = read_shape(description)
        if config.is_file() and shape.config_sha256 == file_sha256(config):
            return shape
    return described(model)


def described(model: Path) -> ModelShape:
    """Describe the model of a folder, with its weights if there are any, or of a config.json."""
    # Loading torch takes seconds, and most predictions need none.
    with importing():
        from workflow.lib.model.describe_model import describe_file, describe_folder

    if not model.is_dir():
        return describe_file(model)
    weights = any(model.glob("*.safetensors"))
    return describe_folder(model) if weights else describe_file(model / "config.json")


def predict(
    args: argparse.Namespace,
    settings: RunConfig,
    shape: ModelShape,
    machine: Machine,
    tokens: TokenCounts,
    *,
    disk_free_bytes: int | None,
    record: Recorder,
) -> None:
    """Decide, write and print; raises `UserError` if the run does not fit."""
    check_tokens(tokens, settings, shape)
    decision = decide(
        settings,
        shape,
        machine,
        tokens,
        disk_free_bytes=disk_free_bytes,
        record=record,
        estimate=args.estimate,
    )
    result = forecast(decision, settings, shape, machine, tokens)
    if args.output is not None:
        write_checked_json(args.output, result.model_dump() | {"provenance": provenance()})
    show = logger.debug if args.brief and decision.fits else logger.info
    show("%s", render(result, run=args.run, host_origin=machine.imagined_host))
    needs = attention_needs(shape)
    attention = training_attention(settings.model, machine, needs)
    show("attention: %s (%s)", attention.name, attention.reason)
    if note := needs.dropout_note(settings.model.attention_dropout):
        show("%s", note)
    if settings.hardware.cuda_graphs and machine.device == "cuda":
        obstacle = decision.chosen.plan.graph_obstacle
        show("hardware.cuda_graphs: %s", f"off ({obstacle})" if obstacle else "on")
    if not decision.fits:
        raise UserError(f"run {args.run} does not fit: {decision.reason}.")


def check_arguments(
    args: argparse.Namespace, *, needed: tuple[str, ...], foreign: tuple[str, ...]
) -> None:
    """Raise `UserError` if an argument of this use is missing, or one of the other use is there."""
    use = "without --config" if args.config is None else "with --config"
    for name in needed:
        if getattr(args, name) is None:
            raise setting_error(f"--{name}", None, f"it is needed {use}", "Give it; see --help")
    for name in foreign:
        if getattr(args, name) not in (None, False):
            bound = f"it has no meaning {use}"
            raise setting_error(f"--{name}", str(getattr(args, name)), bound, "Remove it")


def parser() -> argparse.ArgumentParser:
    arguments = stage_parser(__doc__, config_required=False)
    arguments.add_argument(
        "--model", required=True, help="description, folder, or (by hand) config.json or hub id"
    )
    arguments.add_argument(
        "--description", type=Path, help="that of the folder, made anew where it is not there"
    )
    arguments.add_argument("--output", type=Path, help="preflight.json to write")
    arguments.add_argument("--run", help="name of the run")
    arguments.add_argument(
        "--brief", action="store_true", help="keep the table of a run that fits to the log"
    )
    arguments.add_argument("--tokens", type=Path, help="manifest.json of the tokens")
    by_hand = arguments.add_argument_group("by hand, without --config")
    by_hand.add_argument("--gpus", help="number and kind of GPUs, like 2x4090 or 8xH100")
    by_hand.add_argument(
        "--host-gib",
        type=float,
        help="host memory of the machine, GiB (what is usual with the GPUs)",
    )
    by_hand.add_argument("--seq-len", type=int, default=2048, help="tokens of a row (%(default)s)")
    by_hand.add_argument("--rank", type=int, default=16, help="LoRA rank (%(default)s)")
    by_hand.add_argument(
        "--batch", type=int, help="rows of a step over all GPUs (16 or a few more)"
    )
    by_hand.add_argument("--rows", type=int, default=10_000, help="training rows (%(default)s)")
    by_hand.add_argument("--revision", help="revision of a model of the hub")
    by_hand.add_argument(
        "--estimate",
        action="store_true",
        help="by lines between recordings, without recording the plan itself",
    )
    by_hand.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting"
    )
    return arguments


if __name__ == "__main__":
    run(main, parser())
