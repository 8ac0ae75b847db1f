"""A finished `finetune` stage in 0.5 s of training: its worker function in two forked processes, on
a random model."""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.models import VOCAB, quantized, random_store, tiny_llama
from tests.support.plans import make_forecast, make_plan
from tests.support.shared import made_once
from tests.support.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.support.token_arrays import token_arrays
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.data.tokens.manifest import chat_facts, tokenizer_facts
from workflow.lib.data.tokens.token_store import ARRAYS
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.files import (
    file_sha256,
    provenance,
    read_checked_json,
    write_checked_json,
    write_checksums,
)

STEPS, BATCH, ROWS, SEQ_LEN = 7, 4, 11, 23
CONFIG = RunConfig(
    lora=LoraSettings(r=3, alpha=7.5, use_rslora=True),
    train=TrainConfig(
        epochs=None,
        max_steps=STEPS,
        global_batch_size=BATCH,
        learning_rate=2e-2,
        log_every_steps=3,
        checkpoint_every_steps=4,
    ),
)
PLAN = make_plan(processes=2, accumulation_steps=2, num_steps=STEPS)
PREDICTED_BYTES = 12345


def finished(root: Path) -> Path:
    """Return a folder with `model`, `base`, `tokens`, `preflight.json`, `finetune` and
    `checkpoints`; made once.

    root: the folder that all processes of a session share. Never change what is there."""
    return made_once(root / "finished", prepare_and_train)


def prepare_and_train(folder: Path) -> None:
    prepare(folder)
    write_manifest(folder, folder / "tokens" / "manifest.json")
    run_distributed(finetune, arguments(folder), world_size=2)


def prepare(folder: Path, *, model: Callable[..., Path] = tiny_llama) -> None:
    quantized(model(folder / "model", dtype=torch.bfloat16), folder / "base")
    tiny_tokenizer(folder / "model")
    write_checksums(folder / "base")
    save_tokens(folder / "tokens")
    forecast = make_forecast(plan=PLAN, peak_bytes=PREDICTED_BYTES).model_dump()
    write_checked_json(folder / "preflight.json", forecast | {"provenance": provenance()})


def save_tokens(folder: Path) -> None:
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    documents = [store.heldout_documents()[i] for i in range(store.num_heldout_documents)]
    ids, masks = zip(*documents, strict=True)
    heldout = (np.concatenate(ids), np.concatenate(masks), np.cumsum([0, *map(len, ids)]))
    rows = (store.input_ids, store.loss_mask, store.position_ids)
    arrays = token_arrays(*rows, heldout=heldout)
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(folder / name, array.astype(ARRAYS[name]))
    facts_of = {"tokens": sum(map(len, ids)), "documents": len(documents)}
    facts_of |= {"sources": [{"source": "questions", "documents": len(documents)}]}
    splits = {"train": {"packed_rows": ROWS}, "heldout": facts_of}
    facts = {"format_version": 1, "seq_len": SEQ_LEN, "vocab_size": VOCAB, "splits": splits}
    files = {name: file_sha256(folder / name) for name in arrays}
    write_checked_json(folder / "manifest.json", facts | {"files": files})


def write_manifest(folder: Path, path: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write the manifest to `path` with what `tokenize_dataset` says of conversations in this
    template; return `path`."""
    tokenizer = load_tokenizer(folder / "model")
    encoder = SampleEncoder(tokenizer, chat_template=chat_template, loss_on="completions")
    special = tokenizer_facts(tokenizer, folder / "model", chat_template=chat_template)
    said = special | chat_facts(encoder, chat_template=chat_template) | {"vocab_size": VOCAB}
    write_checked_json(path, read_checked_json(folder / "tokens" / "manifest.json") | said)
    return path


def arguments(folder: Path) -> argparse.Namespace:
    """Return what the stage's command line would give."""
    return argparse.Namespace(
        run="demo",
        base=folder / "base",
        tokens=folder / "tokens",
        preflight=folder / "preflight.json",
        checkpoints=folder / "checkpoints" / "demo-0123456789ab",
        output=folder / "finetune",
        start=None,
        scores=None,
        timeout_s=TIMEOUT_S,
        config={"tracking": {}},
        tracking=folder,
    )


def finetune(args: argparse.Namespace, config: RunConfig = CONFIG, plan: StepPlan = PLAN) -> None:
    from workflow.scripts.finetune_worker import work

    work(args, config, plan)
