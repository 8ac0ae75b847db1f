"""Models and adapters as GGUF files, by llama.cpp's own converters and quantizer.

The converters (`export.llama_cpp`) run as processes, on a folder of links to weights and to the
training's tokenizer. llama.cpp knows no `{% generation %}` blocks, so the template is written
without them. It scales an adapter by alpha / rank with one alpha: other scales go into B."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.stack_names import PREFIX
from workflow.lib.data.encoding.chat_template import without_generation_tags
from workflow.lib.export.adapter_files import CHAT_TEMPLATE, replace_in_config, save_adapter
from workflow.lib.model.architecture.adapter_targets import adapter_scale
from workflow.lib.settings.evaluate import ADAPTER_CONVERTER, CONVERTER, GgufFormat
from workflow.lib.system.environment import shipped_path
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_json, write_text

SHOWN_LINES = 6  # of the converter's last output
CONVERTED: set[GgufFormat] = {"f32", "f16", "bf16", "q8_0"}  # the quantizer makes the others
WHOLE: tuple[GgufFormat, ...] = ("f32", "bf16", "f16")
ADAPTER_TYPE = "f16"  # half of PEFT's file, and 11 bits; small compared with any base
TRAINED_WITH = (CHAT_TEMPLATE, "generation_config.json", "tokenizer.json", "tokenizer_config.json")
PACKAGE = "cyllama"
# `enum llama_ftype` of llama.cpp's include/llama.h.
FILE_TYPES: dict[GgufFormat, int] = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
QUANTIZER_LINES = 4


@dataclass(frozen=True)
class GgufSource:
    """Sources of a GGUF file: a model, and the folder of the tokenizer that was trained with."""

    model: Checkpoint
    tokenizer: Path


def write_models(
    source: GgufSource, outputs: Mapping[GgufFormat, Path], *, llama_cpp: Path, threads: int
) -> None:
    """Write a model as GGUF in each format; raises `UserError` with the failed program's output."""
    output_folder = next(iter(outputs.values())).parent
    converted = [name for name in outputs if name in CONVERTED]
    with tempfile.TemporaryDirectory(dir=output_folder, prefix=".source-") as folder:
        copy = servable_copy(source, Path(folder) / "model")
        for name in converted:
            _convert(llama_cpp / CONVERTER, copy, outputs[name], outtype=name)
        if len(converted) == len(outputs):
            return
        # in at least 16 bits, for conversion to fewer
        whole = next((outputs[name] for name in WHOLE if name in outputs), None)
        if whole is None:
            whole = Path(folder) / "whole.gguf"
            _convert(llama_cpp / CONVERTER, copy, whole, outtype="auto")
        for name in outputs.keys() - converted:
            quantize(whole, outputs[name], format_name=name, threads=threads)


def check_convertible(model: Checkpoint, *, llama_cpp: Path) -> None:
    """Raise `UserError` if the converter does not know a model's class or its tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        copy = servable_copy(GgufSource(model, model.folder), Path(folder) / "model")
        vocabulary = Path(folder) / "vocabulary.gguf"
        _convert(llama_cpp / CONVERTER, copy, vocabulary, "--vocab-only", outtype="auto")


def write_adapter(adapter: Adapter, source: GgufSource, output: Path, *, llama_cpp: Path) -> None:
    """Write PEFT's adapter of a model as a GGUF file; raises `UserError` as `write_models`."""
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".source-") as folder:
        copy = servable_copy(source, Path(folder) / "model")
        scaled = scaled_copy(adapter, Path(folder) / "adapter")
        script = llama_cpp / ADAPTER_CONVERTER
        _convert(script, scaled, output, "--base", str(copy), outtype=ADAPTER_TYPE)


def _convert(script: Path, source: Path, output: Path, *options: str, outtype: str) -> None:
    command = [sys.executable, str(script), str(source), "--outtype", outtype]
    done = subprocess.run(
        [*command, "--outfile", str(output), *options],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    if done.returncode or not output.is_file():
        raise UserError(
            f"export.gguf: llama.cpp's {script.name} could not make {output.name}: "
            f"{_reason(done.stderr)}. If a Python package is missing, run pip install -r "
            f"{shipped_path('envs/gguf.txt')}. If the model is unknown there, name a newer "
            "checkout (export.llama_cpp), or leave out export.gguf."
        )


def _reason(output: str) -> str:
    """Return a converter's error, whole and without its traceback."""
    lines = output.strip().splitlines() or ["it said nothing"]
    begins = [n for n, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)]
    reason = "\n".join(lines[begins[-1] if begins else -SHOWN_LINES :]).rstrip(".")
    if "get_vocab_base_pre" in reason:
        return f"it does not know the model's tokenizer ({reason})"
    return reason


def servable_copy(source: GgufSource, folder: Path) -> Path:
    """Link the model's and tokenizer's files into `folder`, with the template for inference."""
    folder.mkdir()
    files = {path.name: path for path in source.model.folder.iterdir()}
    files |= {
        name: source.tokenizer / name
        for name in TRAINED_WITH
        if (source.tokenizer / name).is_file()
    }
    for name, path in files.items():
        (folder / name).symlink_to(path.resolve())
    _name_architecture(folder / "config.json")
    template = folder / CHAT_TEMPLATE
    if template.exists():
        text = without_generation_tags(template.read_text(encoding="utf-8"))
        template.unlink()
        write_text(template, text)
        replace_in_config(folder, text)
    return folder


def _name_architecture(path: Path) -> None:
    config = Checkpoint(path.parent).config if path.is_file() else {}
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type", ""))
    if class_name is not None and not config.get("architectures"):
        path.unlink()
        write_json(path, config | {"architectures": [class_name]})


def scaled_copy(adapter: Adapter, folder: Path) -> Path:
    """Write the adapter with scale alpha / rank for every module: the rest of it goes into B."""
    config, tensors = adapter.config, adapter.tensors()
    for name, tensor in tensors.items():
        path, is_b, _ = name.partition(".lora_B.")
        if is_b:
            rank = tensor.shape[1]
            factor = adapter_scale(config, path.removeprefix(PREFIX)) * rank / config["lora_alpha"]
            tensors[name] = tensor * factor
    save_adapter(tensors, config, folder)
    return folder


def quantize(source: Path, output: Path, *, format_name: GgufFormat, threads: int) -> None:
    """Write `source`, a 16- or 32-bit GGUF, in fewer bits; raises `UserError` as llama.cpp does."""
    try:
        from cyllama.llama import llama_cpp
    except ImportError:
        raise UserError(
            f"export.gguf = {format_name}: the package {PACKAGE} is not installed, which makes it. "
            f"Run pip install -r {shipped_path('envs/gguf.txt')}, or name formats that need none "
            "(bf16, q8_0)."
        ) from None
    log: list[str] = []
    llama_cpp.set_log_callback(lambda _level, text: log.append(text))
    settings = llama_cpp.LlamaModelQuantizeParams()
    settings.ftype, settings.nthread = FILE_TYPES[format_name], threads
    try:
        llama_cpp.model_quantize(str(source), str(output), settings)
    except RuntimeError as error:
        last = "\n".join("".join(log).strip().splitlines()[-QUANTIZER_LINES:])
        raise UserError(
            f"export.gguf = {format_name}: llama.cpp's quantizer failed ({error}):\n{last}\n"
            "Choose another format, or leave it out."
        ) from None
    finally:
        llama_cpp.disable_logging()
