"""Steps of tiny mixtures whose routers are trained, and the same by stock Transformers and PEFT."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.built_models import built_model
from tests.support.models import VOCAB, random_store
from tests.support.plans import make_plan
from tests.support.stock_training import save_run, stock_peft, trained
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.world import World
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.settings.schedule import step_rows

STEPS, BATCH, ROWS, SEQ_LEN = 2, 12, 13, 23
CPU = torch.device("cpu")
COEFFICIENT = 0.7  # far above that of any family, so that it shows in every gradient
ROUTERS = {"gpt_oss": "mlp.router", "granitemoe": "block_sparse_moe.router"}
TARGETS = ("q_proj", "o_proj")
OTHER_TARGETS = {"deepseek_v3": ("q_b_proj", "o_proj")}


def router(family: str) -> str:
    return ROUTERS.get(family, "mlp.gate")


def targets(family: str) -> tuple[str, ...]:
    return OTHER_TARGETS.get(family, TARGETS)


def config(family: str, *, train: dict[str, Any] | None = None, **lora: Any) -> RunConfig:
    settings = {"r": 4, "target_modules": targets(family), "modules_to_save": (router(family),)}
    steps = {"epochs": None, "max_steps": STEPS, "global_batch_size": BATCH, "adam_eps": 1e-4}
    return RunConfig(
        lora=LoraSettings(**(settings | lora)),
        train=TrainConfig(**(steps | {"learning_rate": 1e-2} | (train or {}))),
    )


def single_documents() -> TokenStore:
    """Rows of one document each, most of them with padding behind it."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(SEQ_LEN // 3, SEQ_LEN + 1, size=(ROWS, 1))
    places = np.arange(SEQ_LEN)[None].repeat(ROWS, 0)
    positions = np.where(places < lengths, places, places - lengths)
    mask = (draw.random(positions.shape) < 0.5) & (positions > 0) & (places < lengths)
    mask[:, 1] = True
    ids = draw.integers(0, VOCAB, size=positions.shape, dtype=np.uint32)
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    store.input_ids, store.position_ids, store.loss_mask = ids, positions.astype(np.int32), mask
    return store


def real_tokens(store: TokenStore, rows: Any) -> torch.Tensor:
    """Where rows (n,) have tokens (n, seq_len) that are not of a last document without targets."""
    real = torch.ones(len(rows), store.seq_len, dtype=torch.long)
    for number, row in enumerate(rows):
        (starts,) = np.nonzero(store.position_ids[row] == 0)
        if not store.loss_mask[row, starts[-1] :].any():
            real[number, starts[-1] :] = 0
    return real


def train_in_process(
    world,
    base: Path,
    settings: RunConfig,
    store: TokenStore,
    micro_batches: int,
    plan: dict[str, Any],
) -> dict[str, Any]:
    return train(base, settings, store, world, micro_batches=micro_batches, plan=plan)


def train(
    base: Path,
    settings: RunConfig,
    store: TokenStore,
    world: World,
    *,
    micro_batches: int = 1,
    plan: dict[str, Any] | None = None,
    graphs: Any = None,
    folder: Path | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str = "eager",
) -> dict[str, Any]:
    """Take the steps of a run, as `trained` does. folder: where it is saved, if anywhere."""
    levers = {"activation_checkpointing": False} | (plan or {})
    model = built_model(
        base, settings, make_plan(**levers), world, dtype=dtype, attention=attention
    )
    size = BATCH // world.size // micro_batches
    found = trained(model, settings.train, store, world, micro_batch_size=size, graphs=graphs)
    if folder is not None:
        save_run(model, folder, store, world)
    return found


def stock(base: Path, family: str, initial: dict[str, torch.Tensor]) -> tuple[Any, dict[str, Any]]:
    """Return stock PEFT on the stock model, with these values, and its parameters by their exported
    names."""
    model, params = stock_peft(base, config(family).lora, attention="eager")
    params = {name: param for name, param in params.items() if name in initial}
    assert params.keys() == initial.keys()
    for name, param in params.items():
        param.data.copy_(initial[name])
    return model, params


def first_rows() -> Any:
    return step_rows(num_rows=ROWS, global_batch_size=BATCH, seed=0, step=0)
