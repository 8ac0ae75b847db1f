"""The stage that asks llama.cpp's converter before the training: it passes what can be converted,
and refuses the rest in one message."""

import argparse

import pytest

from tests.support.llama_cpp_model import (
    VOCAB_SIZE,
    converters,
    forked_converters,
    save_spm_tokenizer,
)
from tests.support.models import random_llama
from tests.support.tiny import tiny_tokenizer
from tests.support.workflow_project import make_project
from workflow.lib.settings.evaluate import CONVERTER
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json, write_json
from workflow.scripts.check_gguf import main


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    random_llama(vocab_size=VOCAB_SIZE).save_pretrained(folder)
    save_spm_tokenizer(folder)
    with forked_converters(tmp_path):
        yield folder


def check(model):
    output = model.parent / "check.json"
    main(
        argparse.Namespace(
            model=model, config={"export": {}}, converter=converters(), output=output
        )
    )
    return output


def test_model_that_can_be_converted_passes_and_leaves_nothing_else(model):
    assert read_json(check(model))["provenance"]
    made = {path.name for path in model.parent.iterdir()} - {"python-of-scripts"}
    assert made == {"check.json", "model"}


def other_tokenizer(model):
    (model / "tokenizer.model").unlink()
    tiny_tokenizer(model)


def other_class(model):
    config = read_json(model / "config.json")
    write_json(model / "config.json", config | {"architectures": ["OfTomorrowForCausalLM"]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_tokenizer, r"(?s)^export\.gguf: .*pre-tokenizer.*leave out export\."),
        (other_class, r"(?s)OfTomorrowForCausalLM is not supported.*newer"),
    ],
)
def test_what_llama_cpp_does_not_know_is_refused(model, change, said):
    change(model)
    with pytest.raises(UserError, match=said):
        check(model)


def test_check_comes_before_the_training_and_never_repeats_it(tmp_path):
    project = make_project(tmp_path / "project")
    assert "check_gguf" not in project.planned("train")
    (project.root / "llama.cpp").mkdir()
    (project.root / "llama.cpp" / CONVERTER).write_text("")
    project.edit({"export": {"merged": True, "gguf": ["bf16"], "llama_cpp": "llama.cpp"}})
    plan = project.planned("train")
    assert (plan["check_gguf"], plan["convert_gguf"]) == (1, 1)
    project.edit({"export": {"serve": "llama_cpp"}})
    assert project.planned("all")["check_served"] == 1
    assert "check_gguf" not in project.planned("results/runs/demo/finetune/summary.json")
