"""From the sharded adapter to files: PEFT reads them, and the merged model is the sum computed by
hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import TemplateError
from peft import AutoPeftModelForCausalLM
from transformers import GenerationConfig

from tests.support.models import VOCAB, quantized, tiny_llama, write_shards
from tests.support.tiny import CHAT_TEMPLATE, tiny_tokenizer
from workflow.lib.artifacts.manifest_record import ConversationFacts
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.encoding.probe_conversations import PROBE
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.data.tokens.manifest import chat_facts
from workflow.lib.export.adapter_files import (
    base_reference,
    check_adapter,
    check_conversations,
    merged_tensors,
    read_sharded_adapter,
    replace_chat_template,
    save_adapter,
    save_tokenizer,
    write_generation_config,
    write_merged,
)
from workflow.lib.kernels.nf4.decode import decoded
from workflow.lib.settings.config import ExportConfig, ModelConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_checked_json, read_json, write_checked_json, write_json

NAME = "base_model.model.model.layers.1.mlp.down_proj"
A, B = f"{NAME}.lora_A.weight", f"{NAME}.lora_B.weight"


@pytest.fixture(scope="module")
def adapter(run):
    return read_sharded_adapter(run / "finetune" / "adapter")


@pytest.fixture(scope="module")
def config(run):
    loaded: dict[str, Any] = read_checked_json(run / "finetune" / "adapter_config.json")
    return loaded


def test_sharded_adapter_has_every_tensor_in_fp32(adapter):
    assert len(adapter) == 2 * 3 * 7
    assert {t.dtype for t in adapter.values()} == {torch.float32}
    assert adapter[A].shape == (3, 176)
    assert adapter[B].shape == (80, 3)


def damaged(adapter, **changes):
    return adapter | {{"a": A, "b": B}[key]: tensor for key, tensor in changes.items()}


def test_adapter_that_is_not_finite_is_refused(adapter):
    for value in (math.nan, math.inf):
        broken = adapter[A].clone()
        broken[2, 7] = value
        with pytest.raises(UserError) as caught:
            check_adapter(damaged(adapter, a=broken))
        assert (
            str(caught.value)
            == f"adapter tensor {A} is not finite. Lower train.learning_rate and train again."
        )


def test_adapter_without_effect_is_refused(adapter):
    zeroed = {n: t * 0 if ".lora_B." in n else t for n, t in adapter.items()}
    with pytest.raises(UserError) as caught:
        check_adapter(zeroed)
    assert str(caught.value) == (
        "every B of the adapter is zero: it changes nothing. Train longer (train.max_steps)."
    )
    check_adapter(damaged(zeroed, b=adapter[B]))  # one that is not zero will do
    check_adapter(zeroed, may_be_zero=True)


def test_adapter_without_tensors_is_refused(tmp_path):
    write_shards(tmp_path, {})
    with pytest.raises(UserError, match=r"the sharded adapter has no tensors\. Train again\."):
        read_sharded_adapter(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "a part missing", "no index", "nothing there"])
def test_damaged_folder_is_refused(run, tmp_path, damage):
    folder = tmp_path / "adapter"
    if damage != "nothing there":
        folder.mkdir()
        for path in (run / "finetune" / "adapter").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    part = folder / "shard-00001-of-00002.safetensors"
    if damage == "truncated":
        part.write_bytes(part.read_bytes()[:-100])
    elif damage == "a part missing":
        part.unlink()
    elif damage == "no index":
        (folder / "index.json").unlink()
    with pytest.raises(UserError) as caught:
        read_sharded_adapter(folder)
    message = str(caught.value)
    assert message.startswith(f"the sharded adapter in {folder} cannot be read (")
    assert f"Delete the folder {folder} and repeat the command" in message
    assert "Traceback" not in message


def merge(run, adapter, config, *, onto):
    with CheckpointReader(run / "model") as original, Checkpoint(run / "base").decoded() as nf4:
        return dict(merged_tensors(adapter, config, original=original, nf4=nf4, onto=onto))


def test_merged_config_is_the_originals_in_bf16(run, tmp_path):
    write_merged(
        iter({"a": torch.zeros(2)}.items()),
        Checkpoint(run / "model"),
        tmp_path / "m",
        settings=ExportConfig(),
    )
    written, original = (
        read_json(tmp_path / "m" / "config.json"),
        read_json(run / "model" / "config.json"),
    )
    assert written == original | {"dtype": "bfloat16"}
    assert "quantization_config" not in written


def test_adapter_of_another_model_is_not_merged(run, adapter, config):
    foreign = adapter | {
        A.replace("layers.1", "layers.9"): adapter[A],
        B.replace("layers.1", "layers.9"): adapter[B],
    }
    with pytest.raises(
        UserError,
        match=r"tensors for base_model\.model\.model\.layers\.9\.mlp\.down_proj, "
        "which the model has not",
    ):
        merge(run, foreign, config, onto="original")


@pytest.mark.parametrize("double_quant", [True, False])
def test_dequantized_weight_of_a_checkpoint_is_what_training_multiplies_with(
    tmp_path, double_quant
):
    from tests.support.models import adapted
    from workflow.lib.model.layers.frozen_linear import frozen_linears

    base = quantized(tiny_llama(tmp_path / "model"), tmp_path / "nf4", double_quant=double_quant)
    linears = dict(frozen_linears(adapted(base).peft_model.get_base_model()))
    with Checkpoint(base).decoded() as reader:
        for path, linear in linears.items():
            name = f"{path.removesuffix('.base_layer')}.weight"
            stored = decoded(*reader.nf4_weight(name))
            assert torch.equal(stored, linear.dequantize(torch.float32)), path


def facts_of(model, template):
    """What `tokenize_dataset` says of conversations in this template."""
    tokenizer = load_tokenizer(model)
    encoder = SampleEncoder(tokenizer, chat_template=template, loss_on="completions")
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return ConversationFacts.model_validate(special | chat_facts(encoder, chat_template=template))


def test_base_of_the_hub_is_named_by_id_and_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checked_json(
        tmp_path / "downloaded" / "source.json", {"repo_id": "acme/tiny", "commit": "c0ffee"}
    )
    settings = ModelConfig(source="acme/tiny", revision="main")
    assert base_reference(settings, Path("downloaded"), export=ExportConfig()) == {
        "base_model_name_or_path": "acme/tiny",
        "revision": "c0ffee",
    }


def test_adapter_on_a_local_base_loads_from_another_working_directory(
    run, adapter, config, tmp_path, monkeypatch
):
    monkeypatch.chdir(run)
    named = base_reference(ModelConfig(source="model"), Path("model"), export=ExportConfig())
    save_adapter(adapter, config | named, tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    tuned = AutoPeftModelForCausalLM.from_pretrained("adapter")
    assert tuned.get_base_model().config.vocab_size == VOCAB


def test_folder_of_a_model_of_the_hub_is_named_by_its_id():
    export = ExportConfig(base_id="acme/tiny")
    named = base_reference(ModelConfig(source="model"), Path("model"), export=export)
    assert named == {"base_model_name_or_path": "acme/tiny", "revision": None}


@pytest.mark.parametrize("source", ["acme/tiny", "model"])
def test_base_in_4_bits_that_is_published_is_named_before_its_original(source):
    settings, export = ModelConfig(source=source), ExportConfig(nf4_base_id="acme/tiny-nf4")
    named = base_reference(settings, Path("model"), export=export)
    assert named == {"base_model_name_or_path": "acme/tiny-nf4", "revision": None}


def test_every_place_of_a_template_in_a_merged_folder_holds_the_trained_one(run, tmp_path):
    for path in (run / "model").glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    old = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "older"}]
    config = tmp_path / "tokenizer_config.json"
    write_json(config, read_json(config) | {"chat_template": old})
    for name in ("chat_template.json", "processor_config.json"):
        write_json(tmp_path / name, {"chat_template": "old"})
    facts = facts_of(run / "model", CHAT_TEMPLATE)
    replace_chat_template(tmp_path, facts=facts)
    check_conversations(tmp_path, facts.probes)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert not [name for name, text in texts.items() if '"old' in text]
    assert read_json(config)["chat_template"] == texts["chat_template.jinja"] == CHAT_TEMPLATE


def test_template_that_writes_the_date_is_exported(run, tmp_path):
    """Trained was one day for all rows; stock Transformers is told the same day for the
    comparison."""
    dated = CHAT_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token + strftime_now('%d %b %Y') }}")
    facts = facts_of(run / "model", dated)
    save_tokenizer(run / "model", tmp_path, facts=facts)
    check_conversations(tmp_path, facts.probes)
    assert (tmp_path / "chat_template.jinja").read_text() == dated


def test_conversation_is_an_error_where_neither_base_nor_training_had_a_template(tmp_path):
    tiny_tokenizer(tmp_path / "model", chat_template=False)
    facts = facts_of(tmp_path / "model", None)
    save_tokenizer(tmp_path / "model", tmp_path / "adapter", facts=facts)
    check_conversations(tmp_path / "adapter", facts.probes)
    tokenizer = load_tokenizer(tmp_path / "adapter")
    with pytest.raises(TemplateError, match="trained without a chat template"):
        tokenizer.apply_chat_template(PROBE.messages)


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({"eos_token_id": 9, "temperature": 0.6, "_from_model_config": True}, [2, 4, 9]),
        ({"eos_token_id": [9, 11]}, [2, 4, 9, 11]),
        ({}, [2, 4, 7]),  # the model's own, of config.json
        (None, [2, 4, 7]),
    ],
)
def test_generation_settings_are_the_bases_with_the_end_tokens_of_the_training(
    run, tmp_path, settings, ends
):
    write_json(tmp_path / "config.json", {"eos_token_id": 7})
    if settings is not None:
        write_json(tmp_path / "generation_config.json", settings)
    template = CHAT_TEMPLATE.replace("+ eos_token", "+ '<|user|>'")
    facts = facts_of(run / "model", template)
    write_generation_config(Checkpoint(tmp_path), tmp_path / "export", facts=facts)
    loaded = GenerationConfig.from_pretrained(tmp_path / "export")
    assert loaded.eos_token_id == ends
    assert (loaded.bos_token_id, loaded.pad_token_id) == (1, 0)
    assert loaded.temperature == (settings or {}).get("temperature", GenerationConfig().temperature)
