"""Copy a base model and add tokens that its tokenizer lacks (`model.add_tokens`).

The copy is a model folder like any other: tokens, NF4 base, evaluation and export use it."""

import argparse

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export.extended_model import write_extended
from workflow.lib.settings.config import ModelConfig
from workflow.lib.system.files import new_folder
from workflow.scripts.command import logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    tokens = ModelConfig.model_validate(args.config["model"]).add_tokens
    source = Checkpoint.open(args.model)
    with new_folder(args.output) as folder:
        added = write_extended(source, folder, tokens)
    logger.info("added %s as tokens %d to %d", ", ".join(tokens), added.start, added.stop - 1)


if __name__ == "__main__":
    run(main, stage_parser(__doc__, needs="model output"))
