"""Whole runs that a real server serves, from the settings to the report."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.llama_cpp_model import SIZES, VOCAB_SIZE, converters, save_spm_tokenizer
from tests.support.models import random_llama
from tests.support.workflow_project import Project, make_project
from workflow.lib.artifacts.layout import SERVING
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import ServedCheck

IN_LLAMA_CPP = {"serve": "llama_cpp", "gguf": ["q8_0"], "gguf_of": ["adapter"]}


@pytest.fixture
def project(tmp_path) -> Project:
    """A project whose model servers read."""
    project = make_project(tmp_path / "project", data={"seq_len": 128})
    model = project.root / "model"
    shutil.rmtree(model)
    sizes = SIZES | {"vocab_size": VOCAB_SIZE, "initializer_range": 0.08}
    random_llama(**sizes).to(torch.bfloat16).save_pretrained(model)
    save_spm_tokenizer(model)
    return project


def test_adapter_is_served_and_reported(project):
    pytest.importorskip("xllamacpp")
    project.edit({"export": IN_LLAMA_CPP | {"llama_cpp": str(converters())}})
    project.run("all")
    served = project.json("check_served", "served.json")
    assert served["server"].startswith("llama.cpp")
    report = (project.root / "results" / "report" / "report.html").read_text()
    assert f"{served['server']} serves the exported model" in report


@pytest.mark.skipif(
    not Path(SERVING).exists(), reason=f"vLLM has no environment ({SERVING}); make serving"
)
def test_vllm_serves_the_loss_that_plain_lora_was_trained_to(project):
    """vLLM has the adapter on the original, the engine had it on a base in 16 bits."""
    steps = project.settings["train"]["max_steps"]
    project.edit(
        {
            "quantize": {"method": "none"},
            "train": {"evaluate_every_steps": steps},
            "export": {"serve": "vllm"},
        }
    )
    project.run("results/runs/demo/check_served/served.json")
    served = read_record(project.folder("check_served") / "served.json", ServedCheck)
    lines = (project.folder("finetune") / "metrics.jsonl").read_text().splitlines()
    assert served.loss == pytest.approx(json.loads(lines[-1])["heldout_loss"], abs=served.bound)
