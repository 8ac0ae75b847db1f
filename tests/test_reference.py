"""The written reference: it is what the models say, and the default `config.yaml` means what it shows."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from workflow.lib import reference
from workflow.lib.config import Config, ReportConfig, RunConfig, load_config, merge
from workflow.lib.reference import (
    config_yaml,
    configuration_md,
    runs_block,
    schema_json,
    spell_type,
)

MEND = "`python -m workflow.lib.reference` writes it again (all settings above `runs:` at their defaults)"

# This setting is written only where it is set.
EVERY = Config.model_validate({"lora": {"modules_to_save": ["lm_head"]}})


def committed() -> str:
    """Return the text of config.yaml."""
    return reference.CONFIG.read_text(encoding="utf-8")


def keys(document: dict[str, Any], path: str = "") -> list[str]:
    """Return the paths of all settings of a document."""
    nested = [
        keys(value, f"{path}{key}.") if isinstance(value, dict) and value else [f"{path}{key}"]
        for key, value in document.items()
    ]
    return [key for below in nested for key in below]


def test_config_yaml_is_what_the_models_say() -> None:
    assert committed() == config_yaml(runs_block(committed())), MEND


def test_table_of_settings_is_what_the_models_say() -> None:
    assert reference.TABLE.read_text(encoding="utf-8") == configuration_md(), MEND


def test_schema_is_what_the_models_say() -> None:
    assert reference.SCHEMA.read_text(encoding="utf-8") == schema_json(), MEND


def test_config_yaml_loads_to_the_defaults_and_the_overrides_of_its_runs() -> None:
    overrides = yaml.safe_load(runs_block(committed()))["runs"]
    report, runs = load_config(yaml.safe_load(committed()))
    assert report == ReportConfig()
    defaults = RunConfig().model_dump(mode="json")
    assert runs == {
        name: RunConfig.model_validate(merge(defaults, override or {}))
        for name, override in overrides.items()
    }


def test_config_yaml_shows_every_setting_once() -> None:
    shown = yaml.safe_load(config_yaml("runs: {demo: {}}\n"))
    expected = EVERY.model_dump(mode="json")
    del shown["runs"], expected["runs"]
    assert keys(shown) == keys(expected)


def test_every_key_of_config_yaml_stands_below_its_description() -> None:
    lines = config_yaml("runs: {}\n").splitlines()
    for before, line in itertools.pairwise(lines):
        if ":" in line and not line.lstrip().startswith("#"):
            assert before.lstrip().startswith("# "), line


def test_table_has_a_row_for_every_setting() -> None:
    document = EVERY.model_dump(mode="json")
    del document["runs"]
    rows = [line for line in configuration_md().splitlines() if line.startswith("| `")]
    below = [key.split(".", 1)[1] for key in keys(document)]
    assert [row.split("`")[1] for row in rows] == below


def test_runs_are_kept_with_all_that_follows() -> None:
    runs = "runs:\n  b: {lora: {r: 3}}  # mine\n  a:\n# last words\n"
    assert config_yaml(runs).endswith("\n" + runs)
    assert runs_block(config_yaml(runs)) == runs


@pytest.mark.parametrize("text", ["model: {}\n", "runs: {}\nruns: {}\n"])
def test_document_without_one_block_of_runs_is_not_overwritten(text: str) -> None:
    with pytest.raises(ValueError, match="lines that start with 'runs:', not one"):
        runs_block(text)


def test_writing_again_sets_changed_values_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = "runs: {mine: {}}\n"
    for name in ("CONFIG", "SCHEMA", "TABLE"):
        monkeypatch.setattr(reference, name, tmp_path / name)
    (tmp_path / "CONFIG").write_text("lora: {r: 99}\n" + runs)
    reference.write_all()
    assert (tmp_path / "CONFIG").read_text() == config_yaml(runs)
    assert json.loads((tmp_path / "SCHEMA").read_text())["title"] == "Config"
    assert (tmp_path / "TABLE").read_text() == configuration_md()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 64}, "whole number, 1 to 64"),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}, "whole number, at least 0, below 2^31"),
        ({"type": "number", "exclusiveMinimum": 0.0, "maximum": 0.01}, "number, above 0, at most 0.01"),
        ({"type": "integer", "minimum": 1, "maximum": 10**9}, "whole number, 1 to 1e9"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "minLength": 1}]}, "text; or null"),
        ({"anyOf": [{"type": "integer"}, {"const": "auto", "type": "string"}]}, "whole number; or auto"),
        ({"enum": ["a", "b"], "type": "string"}, "a, b"),
    ],
)  # fmt: skip
def test_type_and_bounds_are_spelled_in_words(schema: dict[str, Any], words: str) -> None:
    assert spell_type(schema) == words


def test_schema_knows_the_keys_of_a_run() -> None:
    schema = json.loads(schema_json())
    options = schema["properties"]["runs"]["additionalProperties"]["anyOf"]
    assert {"$ref": "#/$defs/RunConfig"} in options
    assert list(schema["$defs"]["RunConfig"]["properties"]) == list(RunConfig.model_fields)


def test_every_reference_of_the_schema_leads_somewhere() -> None:
    text = schema_json()
    names = set(json.loads(text)["$defs"])
    used = {part.split('"')[0] for part in text.split("#/$defs/")[1:]}
    assert used == names
