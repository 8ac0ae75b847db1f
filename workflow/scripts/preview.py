"""Show on the terminal the tokens of a dataset: counts, unread keys, and sample documents.

Everything comes from the tokens folder's manifest. Colours show trained text; without colours,
brackets do. Control characters are spelled out. `--config` has each manifest's
`data.special_tokens_in_text`."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from workflow.lib.data.reading.row_chunks import printable
from workflow.lib.data.tokens.manifest_log import log_facts
from workflow.lib.system.files import read_checked_json
from workflow.scripts.command import run, stage_parser

TRAINED = "bold green"
OPEN, CLOSE = "\u27e6", "\u27e7"  # around trained text, without colours


def main(args: argparse.Namespace) -> None:
    console = Console()
    for path, special_tokens in zip(args.manifests, args.config, strict=True):
        facts = read_checked_json(path)
        log_facts(facts, output=path.parent, special_tokens=special_tokens)
        show_samples(facts, console)


def show_samples(facts: dict[str, Any], console: Console) -> None:
    """Print the sample documents of a manifest, each below its origin."""
    marked = "green" if console.is_terminal else f"between {OPEN} and {CLOSE}"
    _print(console, Text(f"Documents as the model sees them; what is trained is {marked}"))
    for segments, origin in zip(facts["samples"], facts["sample_origins"], strict=True):
        title = f"row {origin['row']} of {origin['file']}"
        if origin["source"] != origin["file"]:
            title = f"{origin['source']}: {title}"
        if "answer" in origin:
            title += f" ({origin['answer']})"
        _print(console, Text(f"\n{printable(title)}", style="bold"))
        for text, trained in segments:
            _print(console, _segment(text, trained, coloured=console.is_terminal), end="")
        console.print()


def _segment(text: str, trained: bool, *, coloured: bool) -> Text:
    shown = "\n".join(printable(line) for line in text.split("\n"))
    if not trained:
        return Text(shown)
    return Text(shown, style=TRAINED) if coloured else Text(f"{OPEN}{shown}{CLOSE}")


def _print(console: Console, text: Text, *, end: str = "\n") -> None:
    console.print(text, end=end, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument(
        "--manifests", type=Path, nargs="+", required=True, help="of tokens folders"
    )
    run(main, parser)
