"""The fields of every JSON artifact as a page of tables, made of the records.

`python -m workflow.scripts.write_artifact_fields` writes it again; a test fails when it is not what
this renders. What the fields mean stands in the records, once.
"""

import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union

from pydantic.fields import FieldInfo

from workflow.lib.artifacts.benchmark_record import BenchmarkRow
from workflow.lib.artifacts.evaluation_record import (
    Evaluation,
    Requirements,
)
from workflow.lib.artifacts.gguf_record import GgufChecks
from workflow.lib.artifacts.manifest_record import ConversationFacts, Manifest
from workflow.lib.artifacts.parity_record import Parity
from workflow.lib.artifacts.preflight_record import Preflight
from workflow.lib.artifacts.quantization_record import Quantization
from workflow.lib.artifacts.records import Record
from workflow.lib.artifacts.training_record import Step, Summary
from workflow.lib.system.files import write_text

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "workflow" / "docs" / "artifact_fields.md"

# The records of files, in the order of the stages.
FILES: tuple[tuple[str, tuple[type[Record], ...]], ...] = (
    ("`manifest.json` of a tokens folder", (Manifest, ConversationFacts)),
    ("`quantization.json` of a base folder", (Quantization,)),
    ("`preflight.json`", (Preflight,)),
    ("`metrics.jsonl`, each line", (Step,)),
    ("`summary.json`", (Summary,)),
    ("`parity.json`", (Parity,)),
    ("`<subject>.json` of an evaluation", (Evaluation,)),
    ("`gguf.json`", (GgufChecks,)),
    ("`requirements.json`", (Requirements,)),
    ("`measurements.jsonl` of the benchmark, each line", (BenchmarkRow,)),
)

HEAD = """\
# Fields of the JSON artifacts

Every field of the JSON files that stages write, with its type and its meaning. Which stage writes
which file, and what else lies on disk, stands in [`artifacts.md`](artifacts.md). Written by
`python -m workflow.scripts.write_artifact_fields` from the records in
[`workflow/lib/artifacts`](../lib/artifacts).

A section is a file; below it stand the objects in it, each once, where it first occurs. A mapping
is from text to what is named. A field may be absent if it is written only where there is something
to say, or if an earlier version did not write it.
"""

_TYPES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    NoneType: "null",
    Any: "any value",
}


def artifact_fields_md() -> str:
    """Return the page as Markdown: a section per file, and one per object in it."""
    shown: set[type[Record]] = set()
    sections = [HEAD]
    for file, records in FILES:
        rows = [row for record in records for row in _rows(record)]
        sections.append(_section(f"## {file}", rows))
        for inner in [inner for record in records for inner in inner_records(record)]:
            if inner not in shown:
                shown.add(inner)
                heading = f"### {inner.__name__}\n\n{_one_line(inner.__doc__)}"
                sections.append(_section(heading, list(_rows(inner))))
    return "\n".join(sections)


def write_page() -> None:
    """Write the page again."""
    write_text(PAGE, artifact_fields_md())


def _section(heading: str, rows: list[str]) -> str:
    return "\n".join([heading, "", "| field | value | meaning |", "|---|---|---|", *rows]) + "\n"


def _rows(record: type[Record]) -> Iterator[str]:
    """Yield the table's row of each field."""
    for name, field in record.model_fields.items():
        cells = [f"`{field.alias or name}`", spell_field(field), _one_line(field.description)]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def inner_records(record: type[Record]) -> Iterator[type[Record]]:
    """Yield the records in a record's fields, those in these after each."""
    for field in record.model_fields.values():
        for inner in _records_of(field.annotation):
            yield inner
            yield from inner_records(inner)


def _records_of(annotation: Any) -> Iterator[type[Record]]:
    if isinstance(annotation, type) and issubclass(annotation, Record):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _records_of(argument)


def spell_field(field: FieldInfo) -> str:
    """Spell what a field may be: `list of whole numbers; or absent`."""
    options = _options(field.annotation)
    if field.is_required():
        return "; or ".join(map(spell_type, options))
    given = [option for option in options if option is not NoneType]
    return "; or ".join([*map(spell_type, given), "absent"])


def spell_type(annotation: Any) -> str:
    """Spell what a value may be; an object of its own leads to its section."""
    if annotation in _TYPES:
        return _TYPES[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, UnionType):
        return "; or ".join(map(spell_type, _options(annotation)))
    if origin is typing.Annotated:
        return spell_type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        plural = "s" if arguments[0] in (str, int, float) else ""
        return f"list of {spell_type(arguments[0])}{plural}"
    if origin is tuple:
        return f"[{', '.join(map(spell_type, arguments))}]"
    if origin is dict:
        return f"mapping to {spell_type(arguments[1])}"
    assert issubclass(annotation, Record), f"no words for {annotation}"
    return f"[{annotation.__name__}](#{annotation.__name__.lower()})"


def _options(annotation: Any) -> list[Any]:
    """Return the members of a union, null last; of another type, the type."""
    if typing.get_origin(annotation) not in (Union, UnionType):
        return [annotation]
    return sorted(typing.get_args(annotation), key=lambda option: option is NoneType)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
