"""The demo's mixture of experts begins as its base model and is what its preset trains."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from workflow.lib.artifacts.local_inputs import check_local_paths
from workflow.lib.settings.config import load_config
from workflow.scripts import upcycle_base

PRESET = Path(__file__).resolve().parents[2] / "workflow" / "presets" / "mixture-demo.yaml"
IDS = torch.arange(5, 200)[None]


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["upcycle_base.py"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workflow").symlink_to(PRESET.parents[1])
    upcycle_base.main()
    return upcycle_base.OUTPUT


@torch.no_grad()
def test_mixture_begins_with_the_logits_of_the_base_and_uses_all_experts(made):
    base, mixture = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (upcycle_base.BASE, made)
    )
    chosen = []

    def note(_module, _inputs, output):
        chosen.append(output[-1])

    hooks = [layer.mlp.gate.register_forward_hook(note) for layer in mixture.model.layers]
    torch.testing.assert_close(mixture(IDS).logits, base(IDS).logits, rtol=1e-4, atol=1e-4)
    assert len(hooks) == len(chosen) == mixture.config.num_hidden_layers
    assert all(len(layer.unique()) == upcycle_base.NUM_EXPERTS for layer in chosen)


def test_preset_trains_what_the_command_makes(made):
    assert "python -m workflow.scripts.upcycle_base\n" in PRESET.read_text()
    ((name, run),) = load_config(yaml.safe_load(PRESET.read_text()))[1].items()
    assert run.model.source == str(made)
    check_local_paths(name, run)
