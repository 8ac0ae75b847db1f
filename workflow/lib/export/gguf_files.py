"""The merged model as GGUF files, by llama.cpp's own converter.

The converter is a script of a llama.cpp checkout (`export.llama_cpp`), which runs as a process of
its own. It takes the tokenizer, the chat template and the end tokens from the merged model's
folder. llama.cpp's template engine knows no `{% generation %}` blocks, which mark what is trained
and write nothing, so the template goes without them.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from workflow.lib.data.encoding.chat_template import without_generation_tags
from workflow.lib.export.adapter_files import CHAT_TEMPLATE
from workflow.lib.quantization.nf4_checkpoint import read_settings
from workflow.lib.settings.evaluate import CONVERTER
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_json, write_text

SHOWN_LINES = 6  # of the converter's last words


def convert(merged: Path, output: Path, *, outtype: str, llama_cpp: Path) -> None:
    """Write the merged model as one GGUF file of type `outtype`.

    Raises `UserError` with the converter's last lines if it fails.
    """
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".source-") as folder:
        source = servable_copy(merged, Path(folder))
        command = [sys.executable, str(llama_cpp / CONVERTER), str(source)]
        command += ["--outtype", outtype, "--outfile", str(output)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    if done.returncode or not output.is_file():
        last = "\n".join(done.stderr.strip().splitlines()[-SHOWN_LINES:])
        raise UserError(
            f"export.llama_cpp: {llama_cpp / CONVERTER} could not convert {merged} to {outtype}:\n"
            f"{last}\nIf a Python package is missing, install it; if the model is unknown there, "
            "take a newer llama.cpp, or leave out export.gguf."
        )


def servable_copy(merged: Path, folder: Path) -> Path:
    """Fill `folder` with links to the model's files, and its chat template without what only
    training reads.
    """
    for path in merged.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    template = folder / CHAT_TEMPLATE
    if template.exists():
        text = without_generation_tags(template.read_text(encoding="utf-8"))
        template.unlink()
        write_text(template, text)
        _in_tokenizer_config(folder / "tokenizer_config.json", text)
    return folder


def _in_tokenizer_config(path: Path, template: str) -> None:
    """Put the template where the tokenizer's settings repeat it."""
    settings = read_settings(path) if path.is_file() else {}
    if "chat_template" in settings:
        path.unlink()
        write_json(path, settings | {"chat_template": template})
