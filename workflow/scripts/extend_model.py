"""Copy a base model, with more tokens (`model.add_tokens`) or scaled positions
(`model.rope_scaling`).

The copy is a model folder like any other: tokens, NF4 base, evaluation and export use it."""

import argparse

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export.extended_model import write_copy
from workflow.lib.settings.config import ModelConfig
from workflow.lib.system.files import new_folder
from workflow.scripts.command import logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    settings = ModelConfig.model_validate(args.config["model"])
    with new_folder(args.output) as folder:
        added = write_copy(Checkpoint.open(args.model), folder, settings)
    if settings.add_tokens:
        tokens = ", ".join(settings.add_tokens)
        logger.info("added %s as tokens %d to %d", tokens, added.start, added.stop - 1)
    if settings.rope_scaling.parameters:
        logger.info("scaled positions: %s", settings.rope_scaling.parameters)


if __name__ == "__main__":
    run(main, stage_parser(__doc__, needs="model output"))
