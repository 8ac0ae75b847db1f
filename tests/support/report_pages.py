"""Pages of the report, rendered and parsed."""

import html.parser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.report_examples import edit
from workflow.lib.report.html_page import render_page
from workflow.lib.report.run_results import Run, RunFolders, read_run
from workflow.lib.settings.config import ReportConfig

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(html.parser.HTMLParser):
    """A parsed page: its elements, its text, the values of its numbers, and what was left open."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements = []
        self.text = []
        self.numbers = set()
        self.scripts = []
        self.open = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "data":
            self.numbers.add(float(str(dict(attrs)["value"])))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] != ["style"]:
            self.text.append(data)

    def attributes(self, name: str) -> list[str]:
        return [str(attrs[name]) for _, attrs in self.elements if name in attrs]


def read(root: Path, *names: str, **has: bool) -> list[Run]:
    """Read runs; has: `gguf` files, a `served` check."""
    tokens = root / "tokens"
    return [
        read_run(RunFolders(str(root / "runs" / name), str(tokens / f"{name}-data"), **has))
        for name in names
    ]


def rendered(root: Path, *names: str, **report: Any) -> str:
    settings = {name: {"lora": {"r": 16}} for name in names}
    return render_page(read(root, *names), report=ReportConfig(**report), settings=settings)


def change_evaluations(folder: Path, change: Callable[[Any], None]) -> None:
    for subject in ("base", "tuned"):
        edit(folder / "evaluate_run" / f"{subject}.json", change)
