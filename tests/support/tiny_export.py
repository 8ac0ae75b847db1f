"""What the evaluation reads, tiny and random: an NF4 base with its tokenizer, an adapter, a tokens
folder.

Made with stock Transformers, bitsandbytes and PEFT, so tests of the reload have another origin than
it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.support.tiny import CHAT_TEMPLATE, VOCAB_SIZE, tiny_tokenizer
from tests.support.token_arrays import token_arrays
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import ARRAYS, Document
from workflow.lib.export.conversions import convert
from workflow.lib.settings.forms import CONVERTED
from workflow.lib.system.files import file_sha256, write_checked_json, write_checksums

LONGEST = 41  # tokens of a document at most


def tiny_base(folder: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Save a random 2-layer Llama as a double-quantized NF4 checkpoint stored in `dtype`; return it
    as quantized."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,  # logits far enough apart for greedy decoding to be no coin toss
    )
    original = folder.with_name(folder.name + "-original")
    LlamaForCausalLM(config).to(dtype).save_pretrained(original)
    quantized = AutoModelForCausalLM.from_pretrained(
        original,
        dtype=dtype,
        device_map="cpu",
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        ),
    )
    quantized.save_pretrained(folder)
    tiny_tokenizer(folder)
    return quantized


def tiny_adapter(base: PreTrainedModel, folder: Path, *, rank: int = 3) -> None:
    """Save a random adapter (B not 0) on every linear of `base`, which is changed."""
    torch.manual_seed(1)
    adapted = get_peft_model(base, LoraConfig(r=rank, lora_alpha=7, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)


def tiny_merged(base: Path, adapter: Path, folder: Path) -> None:
    """Save the adapter merged into the dequantized weights of `base`, in bf16, by stock PEFT."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, device_map="cpu")
    merged = PeftModel.from_pretrained(model.dequantize(), adapter).merge_and_unload()
    original = base.with_name(base.name + "-original")
    plain = AutoModelForCausalLM.from_pretrained(original)  # its config knows of no quantization
    plain.load_state_dict(merged.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer(folder)


def exported_run(folder: Path) -> Path:
    """Fill `folder` with `base`, its original, `adapter`, `merged` and its formats; return it."""
    tiny_adapter(tiny_base(folder / "base"), folder / "adapter")
    tiny_merged(folder / "base", folder / "adapter", folder / "merged")
    for name in ("base", "adapter", "merged"):
        write_checksums(folder / name)
    write_formats(folder)
    return folder


def write_formats(folder: Path) -> None:
    """Write the other formats of the model in `folder`/merged."""
    for form in CONVERTED:
        (folder / form).mkdir()
        how: Any = {"shard_bytes": 2**30, "device": torch.device("cpu")}
        convert(form, Checkpoint(folder / "merged"), folder / form, **how)


def random_documents(count: int, *, seed: int = 0, shortest: int = 3) -> list[Document]:
    """Return documents of random length, ids and masks; the first token of one is never trained,
    the last always."""
    generator = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        length = int(generator.integers(shortest, LONGEST + 1))
        ids = generator.integers(6, VOCAB_SIZE, size=length).astype(np.uint32)
        mask = generator.random(length) < 0.6
        mask[0], mask[-1] = False, True
        documents.append((ids, mask))
    return documents


def tiny_tokens(
    folder: Path,
    documents: list[Document],
    *,
    rows: Sequence[Document] = (),
    examples: str = "texts",
) -> None:
    """Write held-out documents, and training rows of a document each; without any, an empty row."""
    ids, masks = zip(*documents, strict=True)
    train = np.zeros((3, max(1, len(rows)), LONGEST))
    for number, (row_ids, mask) in enumerate(rows):
        length = len(row_ids)
        train[:2, number, :length] = row_ids, mask
        train[2, number] = [*range(length), *range(LONGEST - length)]
    held = (np.concatenate(ids), np.concatenate(masks), np.cumsum([0, *map(len, ids)]))
    arrays = token_arrays(*train, heldout=held)
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(folder / name, array.astype(ARRAYS[name]))
    heldout = {"tokens": sum(map(len, ids)), "documents": len(documents)}
    heldout |= {
        "sources": [
            {"source": "notes", "documents": 1},
            {"source": "questions", "documents": len(documents) - 1},
        ]
    }
    splits = {"train": {"packed_rows": train.shape[1]}, "heldout": heldout}
    template = hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()
    facts = {"format_version": 1, "seq_len": LONGEST, "chat_template_sha256": template}
    facts |= {"template_kwargs": {}, "examples": examples}
    facts |= {"splits": splits, "files": {name: file_sha256(folder / name) for name in ARRAYS}}
    write_checked_json(folder / "manifest.json", facts)
