"""Show on the terminal the tokens of a dataset: counts, unread keys, and sample documents.

Everything comes from the tokens folder's manifest. `--config` has `special_tokens_in_text`, a list
with each manifest's `data.special_tokens_in_text`."""

import argparse
from pathlib import Path

from rich.console import Console

from workflow.lib.data.tokens.manifest_log import log_facts, show_samples
from workflow.lib.system.files import read_checked_json
from workflow.scripts.command import run, stage_parser


def main(args: argparse.Namespace) -> None:
    console = Console()
    for path, special_tokens in zip(
        args.manifests, args.config["special_tokens_in_text"], strict=True
    ):
        facts = read_checked_json(path)
        log_facts(facts, output=path.parent, special_tokens=special_tokens)
        show_samples(facts, console)


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument(
        "--manifests", type=Path, nargs="+", required=True, help="of tokens folders"
    )
    run(main, parser)
