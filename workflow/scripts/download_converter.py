"""Download llama.cpp's converters, which make GGUF files (`export.gguf`), where no checkout of
llama.cpp is named (`export.llama_cpp`).

`--config` is `{"release": "2026.10.11549", "sha256": "..."}`: a version of `xllamacpp`, whose
source distribution has them, and its SHA-256. The folder `--output` appears when it is complete.
"""

import argparse
import logging
from pathlib import Path

from workflow.lib.export.converter_download import download_converters
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    download_converters(args.output, **args.config)
    logger.info("llama.cpp's converters, of xllamacpp %s: %s", args.config["release"], args.output)


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    run(main, parser)
