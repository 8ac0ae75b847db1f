"""The written reference: it is what the models say, and the default `config.yaml` means what it
shows."""

import pytest
import yaml

from workflow.lib.settings.config import load_config
from workflow.scripts import write_settings_pages
from workflow.scripts.write_settings_pages import configuration_md, schema_json, spell_type

CONFIG = write_settings_pages.ROOT / "config.yaml"
MEND = "`python -m workflow.scripts.write_settings_pages` writes it again"


def committed():
    return CONFIG.read_text(encoding="utf-8")


def keys(document, path=""):
    nested = [
        keys(value, f"{path}{key}.") if isinstance(value, dict) and value else [f"{path}{key}"]
        for key, value in document.items()
    ]
    return [key for below in nested for key in below]


def test_table_of_settings_is_what_the_models_say():
    assert write_settings_pages.TABLE.read_text(encoding="utf-8") == configuration_md(), MEND


def test_schema_is_what_the_models_say():
    assert write_settings_pages.SCHEMA.read_text(encoding="utf-8") == schema_json(), MEND


def test_config_yaml_shows_defaults_but_for_the_demo_s_own_settings():
    document = yaml.safe_load(committed())
    ((name, run),) = load_config(document)[1].items()
    assert (name, document["runs"]) == ("demo", {"demo": {}})
    changed = run.model_dump(mode="json", exclude_defaults=True)
    assert set(keys(changed)) == {
        *("model.name", "model.source"),
        *("data.name", "data.train", "data.heldout", "data.seq_len"),
        *("train.epochs", "train.learning_rate"),
        *("evaluate.tasks", "evaluate.tasks_dir"),
    }


def test_config_yaml_is_short_and_explains_every_setting():
    lines = committed().splitlines()
    settings = [
        line for line in lines if line.startswith("  ") and lines.index(line) < lines.index("runs:")
    ]
    assert len(lines) <= 50
    assert [line for line in settings if "#" not in line] == []


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 64}, "whole number, 1 to 64"),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}, (
            "whole number, at least 0, below 2^31"
        )),
        ({"type": "number", "exclusiveMinimum": 0.0, "maximum": 0.01}, (
            "number, above 0, at most 0.01"
        )),
        ({"type": "integer", "minimum": 1, "maximum": 10**9}, "whole number, 1 to 1e9"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "minLength": 1}]}, "text; or null"),
        ({"anyOf": [{"type": "integer"}, {"const": "auto", "type": "string"}]}, (
            "whole number; or auto"
        )),
        ({"enum": ["a", "b"], "type": "string"}, "a, b"),
    ],
)  # fmt: skip
def test_type_and_bounds_are_spelled_in_words(schema, words):
    assert spell_type(schema) == words
