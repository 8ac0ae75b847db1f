"""The stage from the command line: a description, or one message."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.forked_stage import forked_stage
from tests.support.mixtures import tiny_mixture
from tests.support.preflight_examples import TINY, write_checkpoint
from workflow.lib.model.architecture.model_shape import read_shape
from workflow.lib.model.describe_model import describe_folder
from workflow.lib.system.files import file_sha256


def describe(folder, **runs):
    checks = json.dumps({"trains_here": False, "runs": runs})
    options = ["--model", str(folder), "--checks", checks]
    output = ["--output", str(folder / "made" / "description.json")]
    return forked_stage("describe_model", *options, *output)


def test_description_is_that_of_the_folder_and_says_of_which_config_it_is(tmp_path):
    done = describe(write_checkpoint(tmp_path), demo={"data": {"seq_len": 128}})
    assert done.returncode == 0, done.stderr
    shape = read_shape(tmp_path / "made" / "description.json")
    assert shape == describe_folder(tmp_path)
    assert shape.config_sha256 == file_sha256(tmp_path / "config.json")
    assert "llama: 25,890 parameters, 3 decoder layers (3 x full attention)" in done.stderr


def refused(folder, *parts, **runs):
    """Assert exit status 1, one message with all parts, and no output."""
    done = describe(folder, **runs)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr.splitlines()[-1]
    assert not (folder / "made" / "description.json").exists()


def test_run_whose_settings_do_not_suit_the_model_is_refused(tmp_path):
    long = {"data": {"seq_len": 131}}
    refused(
        write_checkpoint(tmp_path),
        "run long: data.seq_len = 131",
        good={"data": {"seq_len": 128}},
        long=long,
    )


def test_model_that_is_not_covered_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, config=TINY | {"model_type": "t5"})
    refused(folder, "model_type = 't5' is an encoder-decoder")


NAMING = (
    "experts.gate_up_proj and experts.down_proj are all experts of a layer, which share rank",
    "routers are trained whole, by lora.modules_to_save.",
)


@pytest.mark.parametrize(
    ("lora", "parts"),
    [
        ({"use_dora": True}, ("lora.use_dora = True: the experts of this model", "no DoRA")),
        ({"target_modules": ["q_proj", "w1"]}, ("lora.target_modules = 'w1': no linear", *NAMING)),
        (
            {"modules_to_save": ["experts"]},
            ("lora.modules_to_save = 'experts': only the", "mlp.gate"),
        ),
    ],
)
def test_adapter_that_a_mixture_cannot_have_is_refused(tmp_path, lora, parts):
    run = {"data": {"seq_len": 64}, "lora": lora}
    refused(tiny_mixture("qwen3_moe", tmp_path), "run mix: ", *parts, mix=run)


def test_balance_of_routers_is_refused_for_a_family_that_has_none(tmp_path):
    run = {"data": {"seq_len": 64}, "train": {"router_aux_loss_coef": 0.01}}
    refused(
        tiny_mixture("glm4_moe", tmp_path),
        "run mix: train.router_aux_loss_coef = 0.01: models of the type glm4_moe have no",
        mix=run,
    )


def test_checkpoint_without_some_experts_is_refused(tmp_path):
    file = tiny_mixture("qwen3_moe", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    rest = {name: x for name, x in tensors.items() if "layers.1.mlp.experts.7." not in name}
    save_file(rest, file, metadata={"format": "pt"})
    refused(tmp_path, "has 10 tensors mlp.experts.*.down_proj.weight", "says 11 experts")


def test_packed_format_that_cannot_be_read_is_refused(tmp_path):
    path = tiny_mixture("mixtral", tmp_path) / "config.json"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.qweight"] = torch.zeros(8, 8, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "hqq"}}
    path.write_text(json.dumps(config))
    refused(tmp_path, "quant_method = 'hqq'; fp8, mxfp4, bitsandbytes, gptq, awq, ")
