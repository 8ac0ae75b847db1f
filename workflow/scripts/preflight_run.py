"""Predict memory, disk and time of a run, choose its micro-batch, refuse what cannot fit.

It predicts from shapes alone. In the workflow (with --config) it reads the description of the base
model, the tokens manifest, and this machine. It writes preflight.json, which `finetune` follows. Of
a run that fits it prints a few lines (the target `preflight` prints the tables); one that does not
fit ends with its tables, exit status 1, and the changes that would make it fit.

By hand (with --gpus) it answers the same for any model on any GPUs, without either:

  python -m workflow.scripts.preflight_run --model meta-llama/Llama-3.1-70B --gpus 2x4090

The verdict comes from the engine itself: it runs two steps of the chosen plan on tensors without
values, and its GPU allocations are replayed. That takes 7 to 20 s the first time, and is cached.
With --estimate the plan itself is not recorded: the answer is by lines between recordings, shipped
or cached for many models, and takes a second then.
"""

import argparse
import logging
import shutil
from pathlib import Path

from workflow.lib.evaluation.task_files import check_tasks
from workflow.lib.model.architecture.model_shape import ModelShape, described_config, read_shape
from workflow.lib.planning.preflight.checks import read_machine, read_tokens
from workflow.lib.planning.preflight.planning_inputs import attention_needs, training_attention
from workflow.lib.planning.preflight.questions import PlannedRun
from workflow.lib.planning.preflight.table import render, summary
from workflow.lib.planning.preflight.what_if import NAME
from workflow.lib.recording.recording_process import plan_recorder
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import file_sha256, provenance, write_checked_json
from workflow.scripts.command import run, stage_parser
from workflow.scripts.preflight_run_by_hand import (
    SEARCHES,
    add_by_hand,
    answer,
    check_arguments,
    described,
)

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    if args.config is None:
        args.run = args.run or NAME
        answer(args, parser(), predict)
        return
    check_arguments(
        args,
        needed=("model", "tokens", "output", "run"),
        foreign=("gpus", "estimate", "host_gib", "seq_len", *SEARCHES),
        use="with --config",
    )
    settings = RunConfig.model_validate(args.config)
    if not args.brief:  # finetune's own prediction, which only follows this one
        check_tasks(settings.evaluate)
    shape = read_model(Path(args.model), args.description)
    tokens = read_tokens(args.tokens)
    machine = read_machine(settings.hardware)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(args.output.parent).free
    with plan_recorder(described_config(Path(args.model)), shape) as record:
        predict(args, PlannedRun(settings, shape, machine, tokens, record, disk_free_bytes=free))


def read_model(model: Path, description: Path | None) -> ModelShape:
    """Return a model's description: `model` itself, or that of a folder, made now if it is missing
    or another model's."""
    if model.is_file():
        return read_shape(model)
    config = model / "config.json"
    if description is not None and description.is_file():
        shape = read_shape(description)
        if config.is_file() and shape.config_sha256 == file_sha256(config):
            return shape
    return described(model)


def predict(args: argparse.Namespace, planned: PlannedRun) -> None:
    """Decide, write and print; raises `UserError` if the run does not fit."""
    decision, result = planned.predicted(advise=True)
    if args.output is not None:
        write_checked_json(args.output, result.model_dump() | {"provenance": provenance()})
    settings, machine, shape = planned.settings, planned.machine, planned.shape
    by_hand = args.config is None
    show = logger.info if (by_hand and not args.brief) or not decision.fits else logger.debug
    show("%s", render(result, run=args.run, host_origin=machine.imagined_host))
    if decision.fits and by_hand == args.brief:
        more = "the same without --brief" if by_hand else "snakemake --cores 1 preflight"
        logger.info("%s", summary(result, run=args.run, more=more))
    needs = attention_needs(shape)
    attention = training_attention(settings.model, machine, needs)
    show = logger.debug if args.brief and not by_hand and decision.fits else logger.info
    show("attention: %s (%s)", attention.name, attention.reason)
    if note := needs.dropout_note(settings.model.attention_dropout):
        show("%s", note)
    if settings.hardware.cuda_graphs and machine.device == "cuda":
        obstacle = decision.chosen.plan.graph_obstacle
        show("hardware.cuda_graphs: %s", f"off ({obstacle})" if obstacle else "on")
    if not decision.fits:
        raise UserError(f"run {args.run} does not fit: {decision.reason}.")


def parser() -> argparse.ArgumentParser:
    arguments = stage_parser(__doc__, config_required=False)
    arguments.add_argument(
        "--model", help="description, folder, or (by hand) config.json or hub id"
    )
    arguments.add_argument(
        "--description", type=Path, help="that of the folder, made anew where it is not there"
    )
    arguments.add_argument("--output", type=Path, help="preflight.json to write")
    arguments.add_argument("--run", help="name of the run")
    arguments.add_argument(
        "--brief",
        action="store_true",
        help="of a run that fits, write to the log alone; by hand, print a few lines",
    )
    arguments.add_argument("--tokens", type=Path, help="manifest.json of the tokens")
    add_by_hand(arguments)
    return arguments


if __name__ == "__main__":
    run(main, parser())
