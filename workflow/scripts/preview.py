"""Show on the terminal what a dataset becomes: counts, what was not read, and sample documents.

Everything shown stands in the tokens folder's manifest. `--config` says of each manifest what
`data.special_tokens_in_text` is.
"""

import argparse
from pathlib import Path
from typing import cast

from rich.console import Console

from workflow.lib.data.tokens.manifest_fields import Manifest
from workflow.lib.data.tokens.manifest_log import log_facts
from workflow.lib.data.tokens.preview import show_samples
from workflow.lib.system.files import read_checked_json
from workflow.scripts.command import run, stage_parser


def main(args: argparse.Namespace) -> None:
    console = Console()
    for path, special_tokens in zip(args.manifests, args.config, strict=True):
        facts = cast(Manifest, read_checked_json(path))
        log_facts(facts, output=path.parent, special_tokens=special_tokens)
        show_samples(facts, console)


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument(
        "--manifests", type=Path, nargs="+", required=True, help="of tokens folders"
    )
    run(main, parser)
