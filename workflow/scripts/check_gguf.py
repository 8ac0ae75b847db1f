"""Ask llama.cpp's converter whether it knows a base model's class and tokenizer, before hours of a
training whose result it could not write.

It writes only the vocabulary, which is deleted. Writes `check.json` on success."""

import argparse
from pathlib import Path

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export.gguf_files import check_convertible
from workflow.lib.settings.config import ExportConfig
from workflow.lib.system.files import provenance, write_checked_json
from workflow.scripts.command import logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    settings = ExportConfig.model_validate(args.config["export"])
    llama_cpp = args.converter or Path(str(settings.llama_cpp))
    check_convertible(Checkpoint(args.model), llama_cpp=llama_cpp)
    write_checked_json(args.output, {"provenance": provenance()})
    logger.info("llama.cpp's converter knows class and tokenizer of %s", args.model)


if __name__ == "__main__":
    run(main, stage_parser(__doc__, needs="model output", takes="converter"))
