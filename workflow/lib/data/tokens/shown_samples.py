"""Sample documents of a manifest on a terminal.

Colours show trained text; without colours, brackets do. Control characters are spelled out."""

from typing import Any

from rich.console import Console
from rich.text import Text

from workflow.lib.data.reading.row_chunks import printable

TRAINED = "bold green"
OPEN, CLOSE = "\u27e6", "\u27e7"  # around trained text, without colours


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
