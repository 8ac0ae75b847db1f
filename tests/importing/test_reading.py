"""Files of other trainers: whose they are, and their tables."""

from typing import get_args

import pytest

from workflow.importing.reading import TrainerName, read_source, table
from workflow.lib.settings.config import Config
from workflow.lib.system.errors import UserError


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.yml", "", "it is empty"),
        ("config.yml", "- 1\n- 2\n", "it has no keys"),
        ("config.yml", "a: [1\n", "this is no YAML"),
        ("config.yml", "a: 1\na: 2\n", "stands there for the second"),
        (
            "config.yml",
            "compute_environment: LOCAL\n",
            "no key tells whose file it is.*--from says",
        ),
        ("config.yml", "base_model: x\ncutoff_len: 3\n", "keys of axolotl and LLaMA-Factory"),
        ("train.py", "SFTConfig(seed=1)", "Python scripts are not read"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_cure(tmp_path, name, text, words):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        read_source(file, None)


@pytest.mark.parametrize("name", [*get_args(TrainerName), "transformers"])
def test_tables_name_settings_that_exist_and_no_key_twice(name):
    read = table(name)
    for setting in [*read.same.values(), *(words.setting for words in read.words.values())]:
        section, key = setting.split(".")
        assert key in Config.model_fields[section].annotation.model_fields, setting
    keys = [key for of in read.reasons.values() for listed in of.values() for key in listed]
    assert sorted(keys) == sorted(set(keys))
