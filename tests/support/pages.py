"""Pages of workflow/docs with parts that a program writes."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "workflow" / "docs"


def with_part(page: str, name: str, text: str) -> str:
    """Return a page with this text between its marks of this name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, rest = page.split(begin)
    return before + begin + text + end + rest.split(end)[1]
