"""A mixture of experts from the checkpoint to what is served: quantized, trained by two processes,
and exported with proof.
"""

import argparse
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.support.finished import CONFIG, finished_mixture
from workflow.lib.export.stock_models import ADAPTER_WEIGHTS
from workflow.lib.model.layers.expert_stacks import expert_stacks
from workflow.lib.settings.config import ExportConfig
from workflow.lib.system.files import read_checked_json
from workflow.scripts.consolidate import main

IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module", params=["glm4_moe", "qwen3_moe", "gpt_oss"])
def run(request: pytest.FixtureRequest, shared_folder: Path) -> Path:
    return finished_mixture(shared_folder, request.param)


@pytest.fixture(scope="module")
def output(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("consolidate") / "consolidate"
    config = CONFIG.model_copy(update={"export": ExportConfig(merged=True)})
    main(
        argparse.Namespace(
            config=config.model_dump(mode="json", include={"model", "export"}),
            finetune=run / "finetune",
            base=run / "base",
            model=run / "model",
            manifest=run / "tokens" / "manifest.json",
            output=folder,
        )
    )
    return folder


def test_stock_reload_of_the_adapter_is_the_trained_model(output: Path) -> None:
    parity = read_checked_json(output / "parity.json")
    assert parity["passed"]
    assert parity["identical_values"]
    assert parity["adapter_effect"] > 100 * parity["rms_difference"]


@torch.no_grad()
def test_merged_model_is_the_adapter_on_the_original(run: Path, output: Path) -> None:
    """Both loaded by stock calls alone; merged weights are rounded to bf16 once."""
    original = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    before = original(IDS).logits
    tuned = PeftModel.from_pretrained(original, str(output / "adapter"))(IDS).logits
    stacks = expert_stacks(original.get_decoder())
    with safe_open(output / "adapter" / ADAPTER_WEIGHTS, framework="pt") as file:
        of_experts = [name for name in file.keys() if ".experts.lora_B" in name]  # noqa: SIM118
        assert all(file.get_tensor(name).any() for name in of_experts)
    assert len(of_experts) == len(stacks) / 2  # of each layer the outer of two wrappers
    merged = AutoModelForCausalLM.from_pretrained(output / "merged", dtype=torch.float32)
    difference = (merged(IDS).logits - tuned).square().mean().sqrt()
    assert difference < 0.1 * (tuned - before).square().mean().sqrt()
