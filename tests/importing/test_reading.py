"""Files of other trainers: whose they are, and what is read of a script."""

from typing import get_args

import pytest

from workflow.importing.reading import Computed, TrainerName, read_script, read_source, table
from workflow.lib.settings.config import Config
from workflow.lib.system.errors import UserError

SCRIPT = """
from unsloth import FastLanguageModel
length = 2048
model, tokenizer = FastLanguageModel.from_pretrained("owner/model", max_seq_length=length)
model = FastLanguageModel.get_peft_model(model, r=8, target_modules=["q_proj"])
rows = load_dataset("owner/rows", split="train")
trainer = DPOTrainer(model=model, args=DPOConfig(learning_rate=5e-6, fp16=not bf16(), beta=0.2))
trainer = train_on_responses_only(trainer)
model, tokenizer = FastLanguageModel.from_pretrained("out/adapter")
raise SystemExit("it is run")
"""


def test_arguments_of_a_script_are_read_without_running_it(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT, encoding="utf-8")
    values = read_script(file)
    assert values["model_name"] == "owner/model"
    assert values["max_seq_length"] == 2048
    assert (values["adapter"], values["r"], values["target_modules"]) == ("lora", 8, ["q_proj"])
    assert (values["objective"], values["learning_rate"], values["beta"]) == ("dpo", 5e-6, 0.2)
    assert (values["dataset_name"], values["dataset_train_split"]) == ("owner/rows", "train")
    assert values["train_on_responses_only"] is True
    assert values["fp16"] == Computed("not bf16()")


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
        ("train.py", "def f(:\n", "it is no Python"),
        ("train.py", "print(1)\n", "no call in it sets up a training"),
        (
            "train.py",
            "SFTConfig(seed=1)\nSFTTrainer(seed=2)\n",
            "line 2: seed = 2: it was 1 before",
        ),
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
