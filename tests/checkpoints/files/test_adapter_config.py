"""What configurations of PEFT's adapters mean as settings, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from tests.support.models import random_llama
from workflow.lib.checkpoints.files.adapter_config import (
    adapter_settings,
    continued,
    read_adapter_config,
)
from workflow.lib.model.architecture.adapter_targets import adapter_ranks
from workflow.lib.settings.config import LoraSettings
from workflow.lib.system.errors import UserError

# As PEFT 0.5 wrote it.
OLD: dict[str, Any] = {
    "auto_mapping": None,
    "base_model_name_or_path": "meta-llama/Llama-2-7b-hf",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_pattern": None,
    "layers_to_transform": None,
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 64,
    "revision": None,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
    r".*?(?:q_proj|v_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))"
)


def settings(**changes: Any) -> LoraSettings:
    return adapter_settings(OLD | changes, "their adapter")


def test_old_configuration_without_newer_keys_is_read():
    found = settings()
    assert found == LoraSettings(r=64, alpha=16, target_modules=("q_proj", "v_proj"))


@pytest.mark.parametrize(
    "given",
    [
        {"target_modules": ["q_proj", "mlp.down_proj"]},
        {"target_modules": r"model\.layers\.[02]\..*_proj"},
        {"target_modules": UNSLOTH},
        {"target_modules": "all-linear"},
        {"target_modules": "all-linear", "exclude_modules": ["up_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.1\..*v_proj"},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": ["o_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "rank_pattern": {r"1\.self_attn\.q_proj": 3}},
    ],
    ids=str,
)
def test_targets_and_ranks_are_what_stock_peft_adapts(given):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(random_llama().config)
        linears = [
            path
            for path, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and path != "lm_head"
        ]
        stock = get_peft_model(model, LoraConfig(r=5, task_type="CAUSAL_LM", **given))
    # What PEFT writes of it: the names that all-linear means, say.
    written = {
        key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for key, value in stock.peft_config["default"].to_dict().items()
    }
    found = adapter_ranks(adapter_settings(written, "their adapter"), linears=linears)
    assert found == {
        path.removeprefix("base_model.model."): module.r["default"]
        for path, module in stock.named_modules()
        if isinstance(module, LoraLayer)
    }


def test_experts_are_targets_by_the_names_of_their_stacks():
    found = settings(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    assert found.target_modules == ("q_proj", "mlp.experts.down_proj")
    dense = settings(target_modules=[], target_parameters=["model.layers.0.mlp.gate_proj.weight"])
    assert dense.target_modules == ("model.layers.0.mlp.gate_proj",)
    both = settings(target_modules=r".*\.q_proj", target_parameters=["experts.up_proj"])
    assert isinstance(both.target_modules, str)
    for path in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.up_proj"):
        assert re.fullmatch(both.target_modules, path)


@pytest.mark.parametrize(
    ("key", "value", "cure"),
    [
        ("bias", "lora_only", "merge_and_unload"),
        ("lora_bias", True, "merge_and_unload"),
        ("peft_type", "ADALORA", "merge_and_unload"),
        ("task_type", "SEQ_CLS", "merge_and_unload"),
        ("layer_replication", [[0, 3]], "merge_and_unload"),
        ("of_a_later_peft", {"on": True}, "merge_and_unload"),
        ("init_lora_weights", "pissa", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "loftq", "path_initial_model_for_weight_conversion"),
    ],
)
def test_what_cannot_be_continued_is_refused_with_the_cure(key, value, cure):
    with pytest.raises(UserError) as error:
        settings(**{key: value})
    assert str(error.value).startswith(f"their adapter: {key} = {value!r} in adapter_config.json: ")
    assert cure in str(error.value)


@pytest.mark.parametrize("changes", [{"r": 0}, {"r": "many"}, {"target_modules": None}])
def test_values_that_no_adapter_has_are_refused(changes):
    with pytest.raises(UserError, match=r"their adapter: adapter_config\.json cannot be continued"):
        settings(**changes)


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"a": '])
def test_file_that_is_no_configuration_is_refused(tmp_path: Path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        read_adapter_config(tmp_path)


def follow(lora: dict[str, Any], *, follow: bool = True) -> LoraSettings:
    return continued(
        LoraSettings(**lora), settings(), run="b", start="theirs", follow=follow, beside={}
    )


def test_settings_at_their_defaults_follow_the_adapter_but_for_dropout():
    found = follow({"dropout": 0.25, "target_modules": ["v_proj", "q_proj"]})
    assert (found.r, found.alpha, found.dropout) == (64, 16.0, 0.25)


def test_all_settings_that_differ_are_named_with_both_values():
    with pytest.raises(UserError) as error:
        follow({"r": 8, "target_modules": ["o_proj"]})
    assert "lora.r = 8: set it to 64" in str(error.value)
    assert f'lora.target_modules = ["o_proj"]: set it to {json.dumps(["q_proj", "v_proj"])}' in str(
        error.value
    )
    assert "alpha" not in str(error.value)


def test_defaults_differ_too_where_nothing_follows():
    with pytest.raises(UserError, match=r"lora\.r = 16: set it to 64"):
        follow({}, follow=False)
