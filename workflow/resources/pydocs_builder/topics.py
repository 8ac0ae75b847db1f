"""The language reference inside `pydoc_data.topics`: sections, and definitions in them."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

_UNDERLINE = re.compile(r"^([*=~^#-])\1{3,}$")
_DEFINITION = re.compile(r"^( *)((?:[a-z_]+\.)+\w+|[a-z_]+\.[\w.]+)(\(.*\))?$")
_INDENT = 3  # spaces that Sphinx's text builder puts before the body of a definition


@dataclass(frozen=True)
class Section:
    """A titled section; `text` excludes its subsections. `source` names the topic and the title."""

    source: str
    title: str
    text: str


@dataclass(frozen=True)
class Definition:
    """A described name, such as `str.capitalize`, with its dedented description."""

    name: str
    parameters: str
    text: str


def read_sections() -> list[Section]:
    """Return the sections of all topics; those that several topics repeat come once."""
    sections: dict[str, Section] = {}
    for topic in sorted(topics):
        for title, text in _split_at_titles(topics[topic]):
            sections.setdefault(
                " ".join(text.split()), Section(f"topic:{topic}#{title}", title, text)
            )
    return [section for section in sections.values() if section.text.strip()]


def _split_at_titles(text: str) -> Iterator[tuple[str, str]]:
    lines = text.split("\n")
    starts = [i - 1 for i in range(1, len(lines)) if _UNDERLINE.match(lines[i]) and lines[i - 1]]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start].strip(), "\n".join(lines[start + 2 : end]).strip("\n")


def definitions(section: Section) -> list[Definition]:
    """Return the described names of a section."""
    lines = section.text.split("\n")
    described = []
    for i, line in enumerate(lines):
        match = _DEFINITION.match(line)
        if not match:
            continue
        body = _indented_body(lines[i + 1 :], len(match.group(1)) + _INDENT)
        if body:
            described.append(Definition(match.group(2), match.group(3) or "", body))
    return described


def _indented_body(lines: list[str], indent: int) -> str:
    """Return the lines from the first on that are blank or indented by `indent`, dedented."""
    body = []
    for line in lines:
        if line.strip() and not line.startswith(" " * indent):
            break
        body.append(line)
    return textwrap.dedent("\n".join(body)).strip("\n")


def with_backquotes(text: str) -> str:
    """Return a text with code in backquotes; Sphinx's text builder writes it in double quotes."""
    return re.sub(r"""(?<![\w\[("'])"(?=\S)(.{1,80}?)(?<=\S)"(?![\w\]"'])""", r"`\1`", text)
