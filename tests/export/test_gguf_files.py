"""What llama.cpp's converter is given, and what is said when it fails."""

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny import tiny_tokenizer
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export.adapter_files import save_adapter
from workflow.lib.export.gguf_files import GgufSource, scaled_copy, servable_copy, write_models
from workflow.lib.settings.evaluate import CONVERTER
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json, write_json

OWN = (
    "{% for m in messages %}{{ m['role'] }}: {%- generation -%} {{ m['content'] }}"
    "{% endgeneration %}\n{% endfor %}"
)


@pytest.fixture
def merged(tmp_path):
    folder = tmp_path / "merged"
    tiny_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(OWN)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_converter_is_given_the_template_without_what_training_reads(merged, tmp_path):
    copy = servable_copy(GgufSource(Checkpoint(merged), merged), tmp_path / "copy")
    text = (copy / "chat_template.jinja").read_text()
    assert "generation" not in text
    assert text.count("{%- if true -%}") == text.count("{% endif %}") == 1
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    assert (merged / "chat_template.jinja").read_text() == OWN


def test_failed_conversion_is_one_message_with_the_last_words(merged, tmp_path):
    llama_cpp = tmp_path / "llama.cpp"
    llama_cpp.mkdir()
    (llama_cpp / CONVERTER).write_text("raise SystemExit('unknown model')")
    source, outputs = GgufSource(Checkpoint(merged), merged), {"bf16": tmp_path / "x.gguf"}
    with pytest.raises(UserError, match=r"could not make x\.gguf: unknown model\. If a Python"):
        write_models(source, outputs, llama_cpp=llama_cpp, threads=1)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.cpp", "merged"]


def test_converter_is_given_the_trained_tokenizer_over_the_base_s(merged, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    write_json(base / "config.json", {"model_type": "llama"})
    (base / "chat_template.jinja").write_text("base")
    (base / "model.safetensors").write_bytes(b"of the base")
    copy = servable_copy(GgufSource(Checkpoint(base), merged), tmp_path / "copy")
    assert "assistant" not in (copy / "chat_template.jinja").read_text()
    assert (copy / "chat_template.jinja").read_text() != "base"
    assert (copy / "model.safetensors").read_bytes() == b"of the base"
    assert (copy / "tokenizer.json").samefile(merged / "tokenizer.json")
    # the converter goes by the class, which some files do not name
    assert read_json(copy / "config.json")["architectures"] == ["LlamaForCausalLM"]
    assert read_json(base / "config.json") == {"model_type": "llama"}


def test_scales_that_llama_cpp_does_not_know_go_into_b(tmp_path):
    """llama.cpp multiplies B A by lora_alpha / rank, the rank that of the tensor."""
    path = "model.layers.0.mlp.down_proj"
    config = {
        "peft_type": "LORA",
        "r": 9,
        "lora_alpha": 6.0,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 4},
        "alpha_pattern": {"down_proj": 10.0},
    }
    a, b = torch.randn(4, 5), torch.randn(7, 4)
    names = [f"base_model.model.{path}.lora_{part}.weight" for part in "AB"]
    save_adapter(dict(zip(names, (a, b), strict=True)), config, tmp_path / "adapter")
    scaled = load_file(
        scaled_copy(Adapter(tmp_path / "adapter"), tmp_path / "scaled")
        / "adapter_model.safetensors"
    )
    by_llama_cpp = 6.0 / 4 * scaled[names[1]] @ scaled[names[0]]
    torch.testing.assert_close(by_llama_cpp, 10.0 / 4**0.5 * b @ a)
