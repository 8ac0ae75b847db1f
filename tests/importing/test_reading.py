"""Files of other trainers: whose they are, and what is read of a script."""

from typing import get_args

import pytest

from workflow.importing.reading import TrainerName, read_source, table
from workflow.importing.rules import translate
from workflow.importing.scripts import Computed
from workflow.lib.settings.config import Config
from workflow.lib.system.errors import UserError
from workflow.scripts.import_config import account

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
    values = read_source(file, None).values
    assert values["model_name"] == "owner/model"
    assert values["max_seq_length"] == 2048
    assert (values["adapter"], values["r"], values["target_modules"]) == ("lora", 8, ["q_proj"])
    assert (values["objective"], values["learning_rate"], values["beta"]) == ("dpo", 5e-6, 0.2)
    assert (values["dataset_name"], values["dataset_train_split"]) == ("owner/rows", "train")
    assert values["train_on_responses_only"] is True
    assert values["fp16"] == Computed("not bf16()")


WRITTEN_WITH_TRL = """
import torch
from datasets import load_dataset, concatenate_datasets
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, pipeline
from trl import SFTConfig, SFTTrainer
base = "owner/model"
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained(base, quantization_config=bits)
model.config.use_cache = False
tokenizer = AutoTokenizer.from_pretrained("owner/other-tokenizer", use_fast=True)
tokenizer.chat_template = "{{ messages }}"
tokenizer.add_tokens(["<tool>"])
rows = load_dataset("owner/rows", split="train")
test = load_dataset("owner/rows", split="test")
rows = rows.map(build).train_test_split(test_size=0.1, seed=7)
rate = 1e-4
rate = 2e-4
more = dict(weight_decay=0.1)
args = SFTConfig(max_length=512, packing=True, learning_rate=rate, **{"seed": 3}, **more)
args.num_train_epochs = 2
adapter = LoraConfig(r=8)
trainer = SFTTrainer(model, args=args, peft_config=adapter)
print(pipeline("text-generation")(trainer.model))
"""


def test_each_call_of_a_script_is_read_or_told_of(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(WRITTEN_WITH_TRL, encoding="utf-8")
    source = read_source(file, None)
    assert source.trainer == "trl_script"
    literals = {k: v for k, v in source.values.items() if not isinstance(v, Computed)}
    assert literals == {
        "load_in_4bit": True, "bnb_4bit_use_double_quant": True, "model_name": "owner/model",
        "use_cache": False, "tokenizer_name": "owner/other-tokenizer",
        "chat_template": "{{ messages }}", "dataset_name": "owner/rows",
        "dataset_train_split": "train", "test_size": 0.1, "max_length": 512, "packing": True,
        "seed": 3, "num_train_epochs": 2, "adapter": "lora", "r": 8, "objective": "sft",
    }  # fmt: skip
    # A name with two values is neither; `more` is computed, so that its keys are not known.
    assert {k for k, v in source.values.items() if isinstance(v, Computed)} == {
        "quantization_config", "add_tokens()", "a further load_dataset", "map()", "pipeline()",
        "learning_rate", "**more", "args", "peft_config",
    }  # fmt: skip


WRITTEN_WITH_UNSLOTH = """
from unsloth import FastLanguageModel, PatchDPOTrainer
from trl import DPOConfig, DPOTrainer
PatchDPOTrainer()
os.environ["WANDB_PROJECT"] = "mine"
model, tokenizer = FastLanguageModel.from_pretrained("owner/model", max_seq_length=4096)
model = FastLanguageModel.get_peft_model(model, random_state=3407)
trainer = DPOTrainer(args=DPOConfig(seed=42, report_to="wandb"), max_length=1024)
"""


def test_arguments_of_the_training_come_before_those_of_the_model(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(WRITTEN_WITH_UNSLOTH, encoding="utf-8")
    draft = translate(read_source(file, None), gpus=1)
    settings = {
        f"{section}.{key}": x for section, of in draft.document.items() for key, x in of.items()
    }
    expected = {
        "train.objective": "dpo", "train.seed": 42, "data.seq_len": 1024,
        "tracking.wandb_project": "mine",
    }  # fmt: skip
    assert expected.items() <= settings.items()
    text = account(draft)
    assert "max_seq_length -> max_length of the training's arguments comes first" in text
    assert "random_state -> seed of the training's arguments comes first" in text


def test_adapter_is_that_of_the_config_within_the_call(tmp_path):
    file = tmp_path / "train.py"
    call = "get_peft_model(model, LoraConfig(r=4))\nSFTTrainer(args=SFTConfig(seed=1))\n"
    file.write_text(call, encoding="utf-8")
    values = read_source(file, None).values
    assert (values["adapter"], values["r"]) == ("lora", 4)
    assert "a further adapter" not in values


def test_what_trl_trains_where_no_key_says_it_is_told(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(WRITTEN_WITH_TRL, encoding="utf-8")
    text = account(translate(read_source(file, None), gpus=1))
    assert "data.loss_on = 'completions': TRL trains whole conversations unless" in text
    assert "learning_rate -> the script computes it (rate); set it by hand" in text
    assert "a further load_dataset -> data.train can name several datasets" in text
    assert "pipeline() -> the script computes it (line 24: pipeline('text-generation'))" in text


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


@pytest.mark.parametrize("name", [*get_args(TrainerName), "trl_script", "transformers"])
def test_tables_name_settings_that_exist_and_no_key_twice(name):
    read = table(name)
    for setting in [*read.same.values(), *(words.setting for words in read.words.values())]:
        section, key = setting.split(".")
        assert key in Config.model_fields[section].annotation.model_fields, setting
    keys = [key for of in read.reasons.values() for listed in of.values() for key in listed]
    assert sorted(keys) == sorted(set(keys))
