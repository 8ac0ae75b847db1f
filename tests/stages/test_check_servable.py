"""The trial of a server before the training: settings that it serves pass, and its own words refuse
the others. That of vLLM is in `test_served_by_vllm.py`."""

import pytest
import torch

from tests.support.llama_cpp_model import SIZES, VOCAB_SIZE, converters, save_spm_tokenizer
from tests.support.models import random_llama
from tests.support.served_export import try_server
from tests.support.workflow_project import make_project
from workflow.lib.artifacts import layout
from workflow.lib.settings.config import load_config
from workflow.lib.settings.evaluate import CONVERTER
from workflow.lib.settings.overrides import merge
from workflow.lib.system.errors import UserError

SERVED = {"serve": "llama_cpp", "gguf": ["bf16"], "gguf_of": ["adapter"], "llama_cpp": "llama.cpp"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servable") / "model"
    random_llama(**SIZES, vocab_size=VOCAB_SIZE).to(torch.bfloat16).save_pretrained(folder)
    save_spm_tokenizer(folder)
    return folder


def tried(model, tmp_path, **lora):
    pytest.importorskip("xllamacpp")
    return try_server(model, tmp_path, llama_cpp=converters(), **lora)


def test_adapter_that_llama_cpp_serves_acts_as_in_peft(model, tmp_path):
    found = tried(model, tmp_path, r=8, use_rslora=True, rank_pattern={"q_proj": 4})
    assert found["server"].startswith("llama.cpp")
    assert found["parts"] == {"adapter": pytest.approx(1.0, abs=0.05)}


def test_what_llama_cpp_refuses_is_told_with_the_settings(model, tmp_path):
    with pytest.raises(
        UserError, match=r"(?s)magnitude.*before the train.*'use_dora': True.*merged"
    ):
        tried(model, tmp_path, r=8, use_dora=True)
    assert not (tmp_path / "servable.json").exists()


def directory(**changes):
    document = {"export": {"serve": "llama_cpp", "merged": True, "gguf": ["bf16"]}}
    (run,) = load_config(merge(document, changes))[1].values()
    return layout.servable_dir(run)


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"train": {"learning_rate": 1e-3}}, True),
        ({"lora": {"dropout": 0.1}}, True),
        ({"lora": {"r": 8}}, False),
        ({"model": {"source": "owner/name"}}, False),
        ({"export": {"merged": False, "gguf_of": ["adapter"]}}, False),
    ],
)
def test_runs_share_a_trial_of_the_same_settings(changes, is_same):
    assert (directory(**changes) == directory()) is is_same


def test_newer_server_is_tried_anew(monkeypatch):
    before = directory()
    monkeypatch.setattr(layout, "version", lambda package: "of tomorrow")
    monkeypatch.setattr(layout, "find_spec", lambda package: package)
    assert directory() != before


def test_trial_comes_before_the_training_once_for_all_runs_and_never_repeats_it(tmp_path):
    project = make_project(tmp_path / "project")
    assert "check_servable" not in project.planned("all")
    (project.root / "llama.cpp").mkdir()
    (project.root / "llama.cpp" / CONVERTER).write_text("")
    project.edit({"export": SERVED, "runs": {"a": {}, "b": {"train": {"learning_rate": 1e-3}}}})
    assert project.planned("train")["check_servable"] == 1
    assert project.planned("preflight")["check_servable"] == 1
    assert "check_servable" not in project.planned("results/runs/a/finetune/summary.json")
