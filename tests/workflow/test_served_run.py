"""A whole run that llama.cpp serves, from the settings to the report."""

import shutil

import pytest
import torch

from tests.support.llama_cpp_model import SIZES, VOCAB_SIZE, converters, save_spm_tokenizer
from tests.support.models import random_llama
from tests.support.workflow_project import make_project

SERVED = {"serve": "llama_cpp", "gguf": ["q8_0"], "gguf_of": ["adapter"]}


def test_adapter_is_served_and_reported(tmp_path):
    pytest.importorskip("xllamacpp")
    project = make_project(tmp_path / "project", data={"seq_len": 128})
    model = project.root / "model"
    shutil.rmtree(model)
    sizes = SIZES | {"vocab_size": VOCAB_SIZE, "initializer_range": 0.08}
    random_llama(**sizes).to(torch.bfloat16).save_pretrained(model)
    save_spm_tokenizer(model)
    project.edit({"export": SERVED | {"llama_cpp": str(converters())}})

    project.run("all")
    served = project.json("check_served", "served.json")
    assert served["server"].startswith("llama.cpp")
    report = (project.root / "results" / "report" / "report.html").read_text()
    assert f"{served['server']} serves the exported model" in report
