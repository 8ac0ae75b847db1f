"""Sample documents of a tokens folder for a terminal: what is trained stands out.

Colours serve on a terminal; elsewhere brackets mark what is trained. What a terminal would obey is
spelled out, as the text comes from data files.
"""

from rich.console import Console
from rich.text import Text

from workflow.lib.data.reading.row import printable
from workflow.lib.data.tokens.manifest_fields import Manifest

TRAINED = "bold green"
OPEN, CLOSE = "\u27e6", "\u27e7"  # around what is trained, where there are no colours


def show_samples(facts: Manifest, console: Console) -> None:
    """Print the sample documents of a manifest, each below where it comes from."""
    marked = "green" if console.is_terminal else f"between {OPEN} and {CLOSE}"
    _print(console, Text(f"Documents as the model sees them; what is trained is {marked}"))
    for segments, origin in zip(facts["samples"], facts["sample_origins"], strict=True):
        title = f"row {origin['row']} of {origin['file']}"
        if origin["source"] != origin["file"]:
            title = f"{origin['source']}: {title}"
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
