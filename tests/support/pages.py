"""Pages and tables of workflow/docs that a program writes."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "workflow" / "docs"


def with_part(page: str, name: str, text: str) -> str:
    """Return a page with this text between its marks of this name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, rest = page.split(begin)
    return before + begin + text + end + rest.split(end)[1]


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows of cells as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
