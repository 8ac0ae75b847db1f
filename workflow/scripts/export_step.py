"""Write the adapter of a checkpoint as a folder that PEFT loads, like that of `consolidate`.

The checkpoint is one of `export.steps`, or any other existing one, also of an unfinished run. If a
run ended before the step, `not_reached.txt` says so, in place of an adapter."""

import argparse
from pathlib import Path

from workflow.lib.artifacts.manifest_record import ConversationFacts
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.model_files import ADAPTER
from workflow.lib.export.adapter_files import Trained, read_sharded_adapter, write_peft_folder
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.checksums import check_files, listed_files, read_artifact
from workflow.lib.system.files import new_folder, write_checksums, write_text
from workflow.lib.training.chosen_checkpoint import GO_BACK, chosen_checkpoint
from workflow.scripts.command import logger, run, stage_parser

NOT_REACHED = "not_reached.txt"


def main(args: argparse.Namespace) -> None:
    last = read_record(args.summary, Summary).num_steps if args.summary else args.step
    with new_folder(args.output) as folder:
        if args.step > last:
            write_not_reached(folder, step=args.step, last=last)
        else:
            write_adapter(args, folder)


def write_not_reached(folder: Path, *, step: int, last: int) -> None:
    reason = (
        f"export.steps = {step}: there is no adapter of this step, since "
        f"train.early_stopping_patience ended the run after step {last}."
    )
    logger.warning("%s", reason)
    write_text(folder / NOT_REACHED, f"{reason}\n")
    write_checksums(folder)


def write_adapter(args: argparse.Namespace, folder: Path) -> None:
    config = RunConfig.model_validate(args.config)
    checkpoint = chosen_checkpoint(
        args.checkpoints, args.step, setting="export.steps", change=GO_BACK
    )
    original = Checkpoint.open(args.model)
    trained_config = read_artifact(args.checkpoints / ADAPTER)
    if trained_config.get("modules_to_save"):  # whose other tensors are the base's
        check_files(listed_files(args.base))
    # rounds may have had nothing to learn so far; all other training refuses a gradient of zero
    tensors = read_sharded_adapter(checkpoint, below="adapter/", may_be_zero=True)
    write_peft_folder(
        Trained(tensors, trained_config),
        folder,
        config,
        model=original,
        base=Checkpoint(args.base),
        facts=read_record(args.manifest, ConversationFacts),
    )
    logger.info("adapter after step %d: %s", args.step, args.output)


if __name__ == "__main__":
    needs = "checkpoints step base model manifest output"
    run(main, stage_parser(__doc__, needs=needs, takes="summary"))
