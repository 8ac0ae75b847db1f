"""Runs of a tiny model whose head and embedding are trained whole (`lora.modules_to_save`), or in
some rows, which the config.json of its base names (kind `ROWS_ALONE`).

Three processes have slices of 71, 71 and 69 rows of the vocabulary of 211."""

from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tests.support.built_models import built_model
from tests.support.distributed import TIMEOUT_S
from tests.support.models import random_store
from tests.support.plans import make_plan
from tests.support.stock_training import trained
from workflow.lib.distributed.world import World, process_group
from workflow.lib.export.adapter_files import read_sharded_adapter, save_adapter
from workflow.lib.export.parity import save_logits, trained_logits
from workflow.lib.model.architecture import vocabulary_slices
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.system.files import read_json, write_json
from workflow.lib.training.checkpoint import save_adapter as save_sharded
from workflow.lib.training.loop import Trainer
from workflow.lib.training.startup_checks import startup_checks

STEPS, BATCH, ROWS, SEQ_LEN, CLIP = 2, 12, 13, 23, 0.5
CPU = torch.device("cpu")
KINDS = {
    "head": ["lm_head"],
    "embedding": ["embed_tokens"],
    "both": ["model.embed_tokens", "lm_head"],
}
TRAIN = TrainConfig(
    epochs=None,
    max_steps=STEPS,
    global_batch_size=BATCH,
    learning_rate=1e-2,
    max_grad_norm=CLIP,
    weight_decay=0.1,
    adam_eps=1e-4,
)
ROWS_ALONE = "rows"
WEIGHT_TOLERANCE = {"rtol": 0.0, "atol": 2e-4}


def config(kind: str, **train: Any) -> RunConfig:
    lora = LoraSettings(r=4, modules_to_save=tuple(KINDS.get(kind, ())))
    return RunConfig(lora=lora, train=TRAIN.model_copy(update=train))


def build(
    base: Path, kind: str, world: World, *, compute_dtype: torch.dtype = torch.float32
) -> Any:
    plan = make_plan(activation_checkpointing=2)
    return built_model(base, config(kind), plan, world, dtype=compute_dtype)


def take(
    model: Any,
    optimizer: Any,
    world: World,
    *,
    first: int = 0,
    num_steps: int = STEPS,
    count: int | None = None,
) -> list[Any]:
    """Make the steps of a run from step `first` on, at most `count`, of two micro-batches each."""
    found = Trainer(
        model.training,
        optimizer,
        random_store(rows=ROWS, seq_len=SEQ_LEN),
        TRAIN,
        micro_batch_size=BATCH // world.size // 2,
        world=world,
    ).steps(first_step=first, num_steps=num_steps)
    return list(islice(found, count))


def train_kinds(base: Path, folder: Path, enough_slices: int, kinds: list[str]) -> dict[str, Any]:
    vocabulary_slices.ENOUGH_SLICES = enough_slices
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        return {kind: train_one(base, kind, folder / kind, world) for kind in kinds}


def train_one(base: Path, kind: str, folder: Path, world: World) -> dict[str, Any]:
    model = build(base, kind, world)
    checks = startup_checks(model, random_store(rows=ROWS, seq_len=SEQ_LEN), base, world)
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    size = BATCH // world.size // 2
    found = trained(model, TRAIN, store, world, micro_batch_size=size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter").mkdir(exist_ok=True)
    save_sharded(model.training, folder / "adapter", world=world)
    logits = trained_logits(
        model.training, random_store(rows=ROWS, seq_len=SEQ_LEN), device=world.device
    )
    if world.is_main:
        save_logits(logits, folder / "parity.safetensors")
        write_json(folder / "adapter_config.json", model.adapter_config())
    return {
        "checks": [check.passed for check in checks],
        "counted": model.num_parameters(),
        **found,
    }


def export(run: Path) -> Path:
    adapter = read_sharded_adapter(run / "adapter")
    save_adapter(adapter, read_json(run / "adapter_config.json"), run / "exported")
    return run / "exported"
