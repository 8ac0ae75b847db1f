"""The stage: a whole folder with what the design promises, or exit status 1 and nothing
exported."""

import argparse
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig

from tests.support.finished import CONFIG, write_manifest
from tests.support.forked_stage import forked_stage, refusal_of
from tests.support.models import stock_base, write_shards
from tests.system.test_checksums import flip, flip_tensor, recorded_as_download
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.data.encoding.probe_conversations import PROBE
from workflow.lib.export.adapter_files import read_sharded_adapter
from workflow.lib.kernels.nf4.decode import decoded
from workflow.lib.settings.config import ExportConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import file_sha256, read_checked_json, read_json, write_checked_json
from workflow.scripts.consolidate import main

# Of one's own: another form than the base's template, and a turn ends with another token than eos.
OWN_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{% if message['role'] == 'assistant' %}{% "
    "generation %}{{ message['content'] }}<|system|>{% endgeneration %}{% else %}{{ "
    "message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif "
    "%}"
)
EOS, END_OF_TURN = 2, 3


def settings(**export):
    config = CONFIG.model_copy(update={"export": ExportConfig(**export)})
    return config.model_dump(mode="json", include={"model", "export"})


@pytest.fixture(scope="module")
def output(run, tmp_path_factory):
    """The stage's folder, from the untouched run, with the merged model and a chat template of
    one's own."""
    folder = tmp_path_factory.mktemp("consolidate")
    manifest = write_manifest(
        run, tmp_path_factory.mktemp("own") / "manifest.json", chat_template=OWN_TEMPLATE
    )
    return consolidated(
        run, folder / "consolidate", manifest=manifest, merged=True, merge_onto="original"
    )


def consolidated(run, output, *, manifest=None, base=None, model=None, **export):
    main(argparse.Namespace(
        config=settings(**export), finetune=run / "finetune", base=base or run / "base",
        model=model or run / "model", manifest=manifest or run / "tokens" / "manifest.json",
        output=output,
    ))  # fmt: skip
    return output


def test_folder_has_what_the_design_promises_and_nothing_temporary(output):
    assert {p.name for p in output.iterdir()} == {"adapter", "parity.json", "merged"}
    names = {"adapter_model.safetensors", "adapter_config.json", "SHA256SUMS"}
    names |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    names |= {"generation_config.json"}
    assert {p.name for p in (output / "adapter").iterdir()} == names
    assert [p.name for p in output.parent.iterdir()] == ["consolidate"]


@pytest.mark.parametrize("folder", ["adapter", "merged"])
def test_export_writes_conversations_in_the_template_of_the_training(run, output, folder):
    tokenizer = AutoTokenizer.from_pretrained(output / folder)
    base = AutoTokenizer.from_pretrained(run / "model")
    ids = tokenizer.apply_chat_template(PROBE.messages)["input_ids"]
    assert ids == base.apply_chat_template(PROBE.messages, chat_template=OWN_TEMPLATE)["input_ids"]
    assert ids != base.apply_chat_template(PROBE.messages)["input_ids"]
    assert (output / folder / "chat_template.jinja").read_text() == OWN_TEMPLATE


@pytest.mark.parametrize("folder", ["adapter", "merged"])
def test_generation_ends_at_the_end_of_turn_of_the_template(output, folder):
    assert GenerationConfig.from_pretrained(output / folder).eos_token_id == [EOS, END_OF_TURN]


def test_tokenizer_does_not_tell_how_it_was_loaded(run, output):
    text = (output / "adapter" / "tokenizer_config.json").read_text()
    assert not [word for word in (str(run), "is_local", "local_files_only") if word in text]


@pytest.mark.parametrize("merged", [False, True])
def test_export_that_writes_a_conversation_otherwise_is_refused(run, tmp_path, merged):
    manifest = write_manifest(run, tmp_path / "manifest.json", chat_template=OWN_TEMPLATE)
    content = read_checked_json(manifest)
    content["probes"][-1]["ids"][4] += 1
    write_checked_json(manifest, content)
    with pytest.raises(UserError) as caught:
        consolidated(run, tmp_path / "consolidate", manifest=manifest, merged=merged)
    assert "writes a conversation (" in str(caught.value)
    assert "Nothing is exported." in str(caught.value)
    assert not (tmp_path / "consolidate").exists()


def test_adapter_names_the_users_base_model_by_its_absolute_path(output):
    config = read_json(output / "adapter" / "adapter_config.json")
    assert config["base_model_name_or_path"] == str(Path(CONFIG.model.source).absolute())
    assert config["revision"] is None


@pytest.mark.parametrize("folder", ["adapter", "merged"])
def test_checksums_cover_every_file(output, folder):
    lines = (output / folder / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    present = {p.name for p in (output / folder).iterdir()} - {"SHA256SUMS"}
    assert listed.keys() == present
    assert all(file_sha256(output / folder / name) == digest for name, digest in listed.items())


def test_exported_adapter_is_the_sharded_one(run, output):
    exported = load_file(output / "adapter" / "adapter_model.safetensors")
    trained = read_sharded_adapter(run / "finetune" / "adapter")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)


@pytest.mark.parametrize("onto", ["original", "dequantized"])
def test_merged_model_is_its_base_with_the_adapter(run, tmp_path, onto):
    """Beside the dense sum in float64."""
    trained = read_sharded_adapter(run / "finetune" / "adapter")
    out = consolidated(run, tmp_path / "consolidate", merged=True, merge_onto=onto)
    exported = load_file(out / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(exported[name], trained[name]) for name in trained)
    original = stock_base(run / "model", attention="eager")
    path, scale = "model.layers.1.mlp.down_proj", 7.5 / 3**0.5
    before = original.get_submodule(path).weight.clone()
    if onto == "dequantized":
        with Checkpoint(run / "base").decoded() as base:
            before = decoded(*base.nf4_weight(f"{path}.weight"))

    def change(tensors):
        key = f"base_model.model.{path}.lora_"
        return scale * (tensors[f"{key}B.weight"].double() @ tensors[f"{key}A.weight"].double())

    with CheckpointReader(out / "merged") as merged:
        torch.testing.assert_close(
            merged.tensor(f"{path}.weight"), (before.double() + change(trained)).bfloat16(),
            rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6,
        )  # fmt: skip


def test_one_value_altered_after_training_exports_nothing(run, tmp_path):
    """By the command line, as Snakemake calls it: status 1, and the reason on terminal and in the
    log."""
    altered = read_sharded_adapter(run / "finetune" / "adapter")
    name = sorted(altered)[5]
    altered[name][0, 1] += 1e-4
    copy = tmp_path / "finetune"
    copy.mkdir()
    for file in (run / "finetune").iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    write_shards(copy / "adapter", altered)
    done = forked_stage(
        "consolidate", config=settings(), finetune=copy, base=run / "base", model=run / "model",
        manifest=run / "tokens" / "manifest.json", output=tmp_path / "consolidate",
        log=tmp_path / "log",
    )  # fmt: skip
    said = refusal_of(done, output=tmp_path / "consolidate")
    assert "exported adapter is not the trained one: its values differ, logits differ by" in said
    assert "Nothing is exported." in said
    assert "its values differ" in (tmp_path / "log").read_text()


def refused(run, folder, **export):
    """Run the stage on copies of base or model that are in `folder`; return its message."""
    copies = {name: folder / name for name in ("base", "model") if (folder / name).exists()}
    output = folder / "consolidate"
    with pytest.raises(UserError) as caught:
        consolidated(run, output, **copies, **export)
    assert not output.exists()
    return str(caught.value)


def test_damaged_base_exports_nothing(run, tmp_path):
    """A bit of the head changes the logits: the message would blame the adapter."""
    base = shutil.copytree(run / "base", tmp_path / "base")
    path = flip_tensor(base, "lm_head.weight")
    assert refused(run, tmp_path) == (
        f"{path} is damaged: it does not have the SHA-256 that was recorded when "
        f"it was made. Delete the folder {base} and repeat the command; the folder is made again."
    )


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damaged_download_is_not_merged_onto(run, tmp_path, name):
    model = recorded_as_download(shutil.copytree(run / "model", tmp_path / "model"))
    flip(model / name, -2)
    message = refused(run, tmp_path, merged=True, merge_onto="original")
    assert message.startswith(f"{model}/{name} is damaged: it does not have the SHA-256 ")
    assert f"Delete the folder {model} " in message
