"""What llama.cpp's converter is given, and what is said when it fails."""

from pathlib import Path

import pytest

from tests.support.tiny import tiny_tokenizer
from workflow.lib.export.gguf_files import convert, servable_copy
from workflow.lib.settings.evaluate import CONVERTER
from workflow.lib.system.errors import UserError

OWN = (
    "{% for m in messages %}{{ m['role'] }}: {%- generation -%} {{ m['content'] }}"
    "{% endgeneration %}\n{% endfor %}"
)


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    folder = tmp_path / "merged"
    tiny_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(OWN)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_converter_is_given_the_template_without_what_training_reads(
    merged: Path, tmp_path: Path
) -> None:
    (tmp_path / "copy").mkdir()
    copy = servable_copy(merged, tmp_path / "copy")
    text = (copy / "chat_template.jinja").read_text()
    assert "generation" not in text
    assert text.count("{%- if true -%}") == text.count("{% endif %}") == 1
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    assert (merged / "chat_template.jinja").read_text() == OWN


def test_failed_conversion_is_one_message_with_the_last_words(merged: Path, tmp_path: Path) -> None:
    llama_cpp = tmp_path / "llama.cpp"
    llama_cpp.mkdir()
    (llama_cpp / CONVERTER).write_text("raise SystemExit('unknown model')")
    with pytest.raises(UserError, match=r"could not convert .*:\nunknown model\nIf a Python"):
        convert(merged, tmp_path / "x.gguf", outtype="bf16", llama_cpp=llama_cpp)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.cpp", "merged"]
