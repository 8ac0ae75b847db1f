"""Write the table and the JSON schema of all settings anew, from their models.

    python -m workflow.scripts.write_settings_pages

A test fails when they are not what this renders. `config.yaml` shows the settings that most people
change, and is written by hand."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from workflow.lib.settings.config import Config, RunConfig, Section
from workflow.lib.settings.errors_in_words import is_section
from workflow.lib.settings.rounds import MOST_ROUNDS
from workflow.lib.settings.section_base import Stage
from workflow.lib.system.files import write_text
from workflow.lib.system.gpu_models import MODELS, OTHER_EXAMPLE

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = "Train this many rounds NAME-1, NAME-2, ..., each from the one before (docs/rewards.md)."
SCHEMA = ROOT / "workflow" / "docs" / "config.schema.json"
TABLE = ROOT / "workflow" / "docs" / "configuration.md"

TABLE_HEAD = """\
# Settings

All keys of [`config.yaml`](../../config.yaml) with type, bounds, default and effect.
`python -m workflow.scripts.write_settings_pages` writes this page from
[`workflow/lib/settings/config.py`](../lib/settings/config.py).

Settings are checked before anything runs. An unknown key is an error. `runs.<name>` may override
all settings except `report`; `rounds` there makes [rounds](rewards.md). A stage reruns if its
settings or files change, unless the section says otherwise.

[Choose settings](choose-settings.md) says which to change. The
[quickstart](quickstart.md#1-a-config-for-your-model-file-and-gpus) writes a config for a file, or
from one of axolotl, LLaMA-Factory or TRL: rows per GPU x accumulation x GPUs become
`train.global_batch_size`, datasets of the hub `data.source` and a glob.
"""

GPUS_HEAD = f"""\
## GPUs

`hardware.gpu_model` and `--gpus` take these names. Another kind has its figures behind the driver's
name: `{OTHER_EXAMPLE}`. They are the memory as PyTorch
reports it, dense bf16 matmuls and memory bandwidth of its data sheet. A visible GPU needs no name.

| name | GiB | TFLOP/s | GB/s | link |
|---|---|---|---|---|"""

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


def configuration_md() -> str:
    """Return the reference as Markdown: key, value, default and effect by section."""
    schema = json_schema()
    names = (name for name in Config.model_fields if is_section(Config, name))
    return "\n".join([TABLE_HEAD, *(_section_md(name, schema) for name in names), _gpus_md()])


def _gpus_md() -> str:
    """Return the table of the kinds of GPU that predictions know."""
    rows = (
        f"| {', '.join(f'`{alias}`' for alias in gpu.aliases)} | {gpu.memory_gib:g} | "
        f"{gpu.flops / 1e12:g} | {gpu.bandwidth / 1e9:,.0f} | {gpu.link.name} |"
        for gpu in MODELS
    )
    return "\n".join([GPUS_HEAD, *rows, ""])


def schema_json() -> str:
    """Return the JSON schema of `config.yaml` for editors, with the keys of `runs.<name>`."""
    schema = json_schema()
    run = json_schema(RunConfig)
    schema["$defs"]["RunConfig"] = {key: run[key] for key in run if key != "$defs"}
    schema["$defs"]["RunConfig"]["properties"] |= {
        "rounds": {"description": ROUNDS, "type": "integer", "minimum": 1, "maximum": MOST_ROUNDS}
    }
    runs = schema["properties"]["runs"]
    runs["additionalProperties"] = {"anyOf": [{"$ref": "#/$defs/RunConfig"}, {"type": "null"}]}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, ensure_ascii=False) + "\n"


def json_schema(model: type[BaseModel] = Config) -> dict[str, Any]:
    """Return the JSON schema of `config.yaml` or of a part of it, each description on one line."""

    def unwrapped(item: dict[str, Any]) -> dict[str, Any]:
        text = item.get("description")
        return item | {"description": " ".join(text.split())} if isinstance(text, str) else item

    schema: dict[str, Any] = json.loads(
        json.dumps(model.model_json_schema()), object_hook=unwrapped
    )
    return schema


def _section_md(name: str, schema: dict[str, Any]) -> str:
    field = schema["properties"][name]
    description = field.get("description") or _referred(field, schema)["description"]
    lines = [f"## {name}\n", f"{description} {_effect_md(type(getattr(Config(), name)))}\n"]
    lines += ["| key | value | default | effect |", "|---|---|---|---|"]
    return "\n".join([*lines, *_rows(field, schema, prefix="")]) + "\n"


def _referred(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = schema["$defs"][field["$ref"].rpartition("/")[2]]
    return section


def _effect_md(section: type[Section]) -> str:
    """Return a section's readers, and its settings that rerun fewer stages."""
    every = {key: section.affected_by(key) for key in section.model_fields}
    readers = [stage for stage in get_args(Stage) if any(a.read_by(stage) for a in every.values())]
    sentences = [f"Read by {_named(readers)}."]
    for effect, reruns in (("plan", "preflight alone"), ("none", "nothing")):
        keys = [key for key, affects in every.items() if affects.effect == effect]
        if keys:
            what = "a setting of it" if len(keys) == len(every) else _named(keys)
            sentences.append(f"Editing {what} reruns {reruns}.")
    return " ".join(sentences)


def _named(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _rows(field: dict[str, Any], schema: dict[str, Any], *, prefix: str) -> Iterator[str]:
    """Yield the table's rows of a section; keys of a nested section carry its name."""
    for key, inner in _referred(field, schema)["properties"].items():
        if "$ref" in inner:
            yield from _rows(inner, schema, prefix=f"{prefix}{key}.")
        else:
            cells = [f"`{prefix}{key}`", spell_type(inner)]
            cells += [f"`{_in_yaml(inner['default'])}`", inner["description"]]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _in_yaml(value: object) -> str:
    return yaml.safe_dump([value], default_flow_style=True, width=sys.maxsize).strip()[1:-1]


def spell_type(schema: dict[str, Any]) -> str:
    """Spell a setting's values, from its JSON schema: `whole number, 1 to 64; or null`."""
    if "anyOf" in schema:
        options = [spell_type(option) for option in schema["anyOf"]]
        return "; or ".join(sorted(options, key="null".__eq__))
    if "oneOf" in schema:
        return "; or ".join(spell_type(option) for option in schema["oneOf"])
    if "$ref" in schema:
        return "section"
    items = schema.get("items", {})
    if "oneOf" in items:
        return "list of these"
    if items.get("type") == "integer":
        return "list of whole numbers"
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "minimum" in schema and "maximum" in schema:
        least, most = (_number(schema[bound]) for bound in ("minimum", "maximum"))
        return f"{_TYPES[schema['type']]}, {least} to {most}"
    bounds = [words.format(_number(schema[key])) for key, words in _BOUNDS.items() if key in schema]
    return ", ".join([_TYPES[schema["type"]], *bounds])


def _number(value: float) -> str:
    """Spell a bound: powers of two and ten as such if they have many digits."""
    if value == int(value) and value >= 2**20:
        bits = int(value).bit_length() - 1
        return f"2^{bits}" if value == 2**bits else f"{value:.0e}".replace("e+0", "e")
    return f"{value:,g}" if value < 1e6 else str(value)


if __name__ == "__main__":
    write_text(SCHEMA, schema_json())
    write_text(TABLE, configuration_md())
