"""A finished `finetune` stage in 0.5 s of training: its worker function in two forked processes, on a random model."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.distributed import run_distributed
from tests.models import VOCAB, quantized, random_store, tiny_llama
from workflow.lib.artifacts import write_json
from workflow.lib.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.tokens import ARRAYS

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
PLAN = {
    "device": "cpu", "processes": 2, "nodes": 1, "shard_size": 2, "micro_batch_size": 1, "accumulation_steps": 2, "activation_checkpointing": True,
    "reshard_after_forward": True, "offload_activations": False, "offload_window_bytes": None, "offload_embedding": False, "offload_layers": 0, "gpu_memory_bytes": None, "compute_dtype": "float32", "num_steps": STEPS,
}  # fmt: skip
PREDICTED_BYTES = 12345


def finished(root: Path) -> Path:
    """Return a folder with `model`, `base`, `tokens`, `preflight.json`, `finetune` and `checkpoints`; made once.

    root: what all of a session's test modules share. Never change what is there.
    """
    folder = root / "finished"
    if not folder.exists():
        prepare(folder)
        run_distributed(finetune, arguments(folder), world_size=2)
    return folder


def prepare(folder: Path) -> None:
    quantized(tiny_llama(folder / "model", dtype=torch.bfloat16), folder / "base")
    save_tokens(folder / "tokens")
    write_json(folder / "preflight.json", {"plan": PLAN, "peak_bytes": PREDICTED_BYTES})


def save_tokens(folder: Path) -> None:
    """Write `random_store` as a tokens folder."""
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    documents = [store.heldout_documents()[i] for i in range(store.num_heldout_documents)]
    arrays = {
        "train.input_ids.npy": store.input_ids,
        "train.loss_mask.npy": store.loss_mask,
        "train.position_ids.npy": store.position_ids,
        "heldout.input_ids.npy": np.concatenate([ids for ids, _ in documents]),
        "heldout.loss_mask.npy": np.concatenate([mask for _, mask in documents]),
        "heldout.offsets.npy": np.cumsum([0, *(len(ids) for ids, _ in documents)]),
    }
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(folder / name, array.astype(ARRAYS[name]))
    heldout = {"tokens": len(arrays["heldout.input_ids.npy"]), "documents": len(documents)}
    heldout |= {"sources": [{"source": "questions", "documents": len(documents)}]}
    splits = {"train": {"packed_rows": ROWS}, "heldout": heldout}
    facts = {"format_version": 1, "seq_len": SEQ_LEN, "vocab_size": VOCAB}
    write_json(folder / "manifest.json", facts | {"splits": splits})


def arguments(folder: Path) -> argparse.Namespace:
    """Return what the stage's command line would give."""
    return argparse.Namespace(
        run="demo", base=folder / "base", tokens=folder / "tokens", preflight=folder / "preflight.json",
        checkpoints=folder / "checkpoints" / "demo-0123456789ab", output=folder / "finetune", timeout_s=60.0,
        tracking={"tracking": {}}, tracking_folder=folder,
    )  # fmt: skip


def finetune(args: argparse.Namespace, config: RunConfig = CONFIG) -> None:
    """Be one worker of the stage."""
    from workflow.scripts.finetune_worker import work

    plan: dict[str, Any] = PLAN
    work(args, config, plan)
