"""The fenced blocks of all pages, their commands, and who runs them.

The test of pages runs every block of `bash` and `python`, page by page, unless an HTML comment
right before it says why not (`<!-- not run: ... -->`), or names the tests that run it
(`<!-- run by ... -->`)."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"<!-- (not run: |run by )(.+?) -->\n\Z")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = ("bash", "python")


class Block(NamedTuple):
    """A fenced block, and the comment before it: why it is not run, or the tests that run it."""

    language: str
    text: str
    not_run: str | None
    run_by: tuple[str, ...]

    @property
    def is_run_here(self) -> bool:
        return self.language in RUN and self.not_run is None and not self.run_by

    def commands(self) -> list[str]:
        """Return the commands of a block of bash, or one for a block of Python."""
        if self.language == "python":
            return [self.text]
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def tracked(*folders: str) -> list[str]:
    """Return the project's files in these folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-c", "-o", "--exclude-standard", "--"]
    listed = subprocess.run([*command, *folders], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def pages() -> list[str]:
    """Return all Markdown files but the notes of changes, which quote commands of their time."""
    return [name for name in tracked(".") if name.endswith(".md") and name != "CHANGELOG.md"]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    text, found = text_of(page), list[Block]()
    for fence in FENCE.finditer(text):
        kind, words = (
            match.groups() if (match := MARK.search(text[: fence.start()])) else (None, "")
        )
        not_run = words if kind == "not run: " else None
        run_by = tuple(words.split(" and ")) if kind == "run by " else ()
        found.append(Block(fence[1], fence[2], not_run, run_by))
    return found
