"""Written reference of all settings, rendered from their models: `config.yaml`, its JSON schema, and a table.

    python -m workflow.lib.reference

writes the three files again, every setting at its default; a test fails when they are not what this
renders. The block `runs:` at the end of `config.yaml` is kept as it is, with everything below it.
Knows how to spell settings, not what they do: that stands in `config`, once.
"""

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from workflow.lib.artifacts import write_text
from workflow.lib.config import Config, RunConfig, Section, json_schema
from workflow.lib.config_errors import is_section
from workflow.lib.runs import OPERATIONAL_KEYS, STAGE_SECTIONS, UNRECORDED_SECTIONS

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "config.yaml"
SCHEMA = ROOT / "workflow" / "docs" / "config.schema.json"
TABLE = ROOT / "workflow" / "docs" / "configuration.md"
LINE_LENGTH = 100

CONFIG_HEAD = """\
# yaml-language-server: $schema=workflow/docs/config.schema.json
#
# All settings of the workflow, each with its default: a key that is left out has the value shown
# here. `runs:`, at the end, names the runs; what stands above it is shared by all of them, and each
# may override any of it. Paths are relative to the folder that Snakemake runs in.
# All but `runs:` is written by `python -m workflow.lib.reference`, which restores the defaults.
"""

TABLE_HEAD = """\
# Settings

Every key of [`config.yaml`](../../config.yaml), with its type, bounds, default and effect. Written by
`python -m workflow.lib.reference` from the models in [`workflow/lib/config.py`](../lib/config.py).

Settings are checked before anything runs; an unknown key is an error. `runs.<name>` may override any
setting of any section except `report` and `benchmark`. A stage runs again when a section that it reads changes, or a
file that it reads; changing `hardware` or `tracking` never trains again.
"""

# Readers of the sections that belong to no run.
WHOLE_DOCUMENT_READERS = {"report": "render_report", "benchmark": "benchmark_run"}

# Words for the types and bounds of a JSON schema; {} is the bound.
_TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "array": "list of names",
    "object": "mapping",
    "string": "text",
    "null": "null",
}
_BOUNDS = {
    "exclusiveMinimum": "above {}",
    "minimum": "at least {}",
    "exclusiveMaximum": "below {}",
    "maximum": "at most {}",
}
# What a key's value shows by itself, so that config.yaml need not say it again.
_PLAIN = {"text", "text; or null", "true or false", "list of names", "mapping"}


def config_yaml(runs: str) -> str:
    """Return the complete commented `config.yaml`, which ends with the block `runs`, verbatim."""
    sections = (_section_yaml(name, field) for name, field in _sections(Config))
    comment = _comment(_description(Config.model_fields["runs"]), indent=0)
    return "\n".join([CONFIG_HEAD, *sections, comment + runs])


def runs_block(text: str) -> str:
    """Return the lines of a `config.yaml` from `runs:` to its end; raises `ValueError` if it has none."""
    lines = text.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if line.startswith("runs:")]
    if len(starts) != 1:
        raise ValueError(f"config.yaml has {len(starts)} lines that start with 'runs:', not one")
    return "".join(lines[starts[0] :])


def configuration_md() -> str:
    """Return the reference as Markdown: a table of key, value, default and effect for each section."""
    return "\n".join([TABLE_HEAD, *(_section_md(*section) for section in _sections(Config))])


def schema_json() -> str:
    """Return the JSON schema of `config.yaml` for editors, which knows the keys of `runs.<name>` too."""
    schema = json_schema()
    run = RunConfig.model_json_schema()
    schema["$defs"]["RunConfig"] = {key: run[key] for key in run if key != "$defs"}
    runs = schema["properties"]["runs"]
    runs["additionalProperties"] = {"anyOf": [{"$ref": "#/$defs/RunConfig"}, {"type": "null"}]}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def write_all() -> None:
    """Write `config.yaml`, its schema and its table again."""
    write_text(CONFIG, config_yaml(runs_block(CONFIG.read_text(encoding="utf-8"))))
    write_text(SCHEMA, schema_json())
    write_text(TABLE, configuration_md())


def _sections(model: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the sections of a model with their names."""
    for name, field in model.model_fields.items():
        if is_section(model, name):
            yield name, field


def _section_yaml(name: str, field: FieldInfo, *, indent: int = 0) -> str:
    """Return a section: its description, its name, and its keys below it."""
    model = _model(field)
    schema = json_schema()["$defs"][model.__name__]["properties"]
    lines = [_comment(_description(field), indent=indent), f"{' ' * indent}{name}:\n"]
    for key, inner in model.model_fields.items():
        if is_section(model, key):
            lines.append(_section_yaml(key, inner, indent=indent + 2))
        else:
            lines += [_comment(_description(inner), indent=indent + 2)]
            lines += [" " * (indent + 2) + _key_yaml(key, inner, spell_type(schema[key])) + "\n"]
    return "".join(lines)


def _key_yaml(key: str, field: FieldInfo, kind: str) -> str:
    """Return a key with its default, and behind it what else it may be."""
    line = f"{key}: {_default(field)}"
    return line if kind in _PLAIN else f"{line}  # {kind}"


def _section_md(name: str, field: FieldInfo) -> str:
    both = (*STAGE_SECTIONS.items(), *UNRECORDED_SECTIONS.items())
    readers = [f"`{stage}`" for stage, sections in both if name in sections]
    readers = readers or [f"`{WHOLE_DOCUMENT_READERS[name]}`"]
    lines = [f"## {name}\n", f"{_description(field)} Read by {', '.join(readers)}.\n"]
    if name == "train":
        kept = ", ".join(
            f"`{key}`" for key in _model(field).model_fields if key in OPERATIONAL_KEYS
        )
        lines.append(f"A checkpoint stays valid when these change: {kept}.\n")
    lines += ["| key | value | default | effect |", "|---|---|---|---|", *_rows(field, prefix="")]
    return "\n".join(lines) + "\n"


def _rows(field: FieldInfo, *, prefix: str) -> Iterator[str]:
    """Yield the table's rows of a section; keys of a nested section carry its name."""
    model = _model(field)
    schema = json_schema()["$defs"][model.__name__]["properties"]
    for key, inner in model.model_fields.items():
        if is_section(model, key):
            yield from _rows(inner, prefix=f"{prefix}{key}.")
        else:
            cells = [f"`{prefix}{key}`", spell_type(schema[key])]
            cells += [f"`{_default(inner)}`", _description(inner)]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def spell_type(schema: dict[str, Any]) -> str:
    """Spell what a setting may be, from its JSON schema: `whole number, 1 to 64; or null`."""
    if "anyOf" in schema:
        options = [spell_type(option) for option in schema["anyOf"]]
        return "; or ".join(sorted(options, key="null".__eq__))
    if "oneOf" in schema:
        return "; or ".join(spell_type(option) for option in schema["oneOf"])
    if "$ref" in schema:
        return "section"
    if schema.get("type") == "array" and "oneOf" in schema["items"]:
        return "list of these"
    if schema.get("type") == "array" and schema["items"].get("type") == "integer":
        return "list of whole numbers"
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "minimum" in schema and "maximum" in schema:
        return f"{_TYPES[schema['type']]}, {_number(schema['minimum'])} to {_number(schema['maximum'])}"
    bounds = [words.format(_number(schema[key])) for key, words in _BOUNDS.items() if key in schema]
    return ", ".join([_TYPES[schema["type"]], *bounds])


def _number(value: float) -> str:
    """Spell a bound: powers of two and ten as such where digits would have to be counted."""
    if value == int(value) and value >= 2**20:
        bits = int(value).bit_length() - 1
        return f"2^{bits}" if value == 2**bits else f"{value:.0e}".replace("e+0", "e")
    return f"{value:,g}" if value < 1e6 else str(value)


def _model(field: FieldInfo) -> type[Section]:
    kind = field.annotation
    assert isinstance(kind, type), "is_section guarantees a section"
    assert issubclass(kind, Section), "is_section guarantees a section"
    return kind


def _description(field: FieldInfo) -> str:
    assert field.description is not None, "a test guarantees a description of every setting"
    return field.description


def _default(field: FieldInfo) -> str:
    """Return the default in YAML, on one line."""
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return yaml.safe_dump([value], default_flow_style=True, width=sys.maxsize).strip()[1:-1]


def _comment(text: str, *, indent: int) -> str:
    """Return text as comment lines."""
    start = " " * indent + "# "
    lines = textwrap.wrap(text, LINE_LENGTH - len(start), break_on_hyphens=False)
    return "".join(f"{start}{line}\n" for line in lines)


if __name__ == "__main__":
    write_all()
