"""Fewer bits for a GGUF file, by llama.cpp's own quantizer (`llama_model_quantize`).

It comes with the package `cyllama` (envs/gguf.txt). A format says which types the tensors get by
their role; a row that is not whole blocks of 256 gets a type of smaller blocks.
"""

from pathlib import Path

from workflow.lib.settings.evaluate import GgufFormat
from workflow.lib.system.errors import UserError

PACKAGE = "cyllama"
# `enum llama_ftype` of llama.cpp's include/llama.h.
FILE_TYPES: dict[GgufFormat, int] = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
SHOWN_LINES = 4


def quantize(source: Path, output: Path, *, format_name: GgufFormat, threads: int) -> None:
    """Write `source`, a GGUF file of 16 or 32 bits, in a format of fewer. Raises `UserError` with
    what llama.cpp says if it fails."""
    try:
        from cyllama.llama import llama_cpp
    except ImportError:
        raise UserError(
            f"export.gguf = {format_name}: the package {PACKAGE} is not installed, which makes it. "
            "Run pip install -r envs/gguf.txt, or name formats that need none (bf16, q8_0)."
        ) from None
    said: list[str] = []
    llama_cpp.set_log_callback(lambda _level, text: said.append(text))
    settings = llama_cpp.LlamaModelQuantizeParams()
    settings.ftype, settings.nthread = FILE_TYPES[format_name], threads
    try:
        llama_cpp.model_quantize(str(source), str(output), settings)
    except RuntimeError as error:
        last = "\n".join("".join(said).strip().splitlines()[-SHOWN_LINES:])
        raise UserError(
            f"export.gguf = {format_name}: llama.cpp's quantizer failed ({error}):\n{last}\n"
            "Choose another format, or leave it out."
        ) from None
    finally:
        llama_cpp.disable_logging()
