"""The same training twice: by the engine in a group of processes, and by stock Transformers,
bitsandbytes and PEFT in one. Both start from the same values and tell losses, norms, gradients of
every step, and the values at the end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from tests.support.built_models import built_model
from tests.support.gathering import all_full, full
from tests.support.models import random_store
from tests.support.plans import make_plan
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.world import World
from workflow.lib.export.parity import save_logits, trained_logits
from workflow.lib.export.stock_models import load_base
from workflow.lib.model.lora import TRAINED_ROWS, trainable_parameters
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.settings.schedule import step_rows
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.files import write_json
from workflow.lib.training.batches import MicroBatch, stored_batch
from workflow.lib.training.build import TrainingModel
from workflow.lib.training.checkpoint import save_adapter
from workflow.lib.training.loop import Trainer, make_optimizer
from workflow.lib.training.optimizers import learning_rate
from workflow.lib.training.startup_checks import startup_checks

STEPS = 3  # the third begins the second pass over the rows
ROWS, SEQ_LEN, BATCH = 10, 37, 4


def settings(**lora: Any) -> RunConfig:
    return RunConfig(
        lora=LoraSettings(r=4, alpha=8, **lora),
        train=TrainConfig(
            epochs=None,
            max_steps=STEPS,
            global_batch_size=BATCH,
            learning_rate=1e-2,
            weight_decay=0.1,
            max_grad_norm=0.5,
        ),
    )


def plan(*, processes: int, micro_batch_size: int, **changes: Any) -> StepPlan:
    fields = {
        "processes": processes,
        "micro_batch_size": micro_batch_size,
        "accumulation_steps": BATCH // processes // micro_batch_size,
        "num_steps": STEPS,
    }
    return make_plan(**(fields | changes))


def ours(
    world: World,
    base: Path,
    config: RunConfig,
    plan: StepPlan,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> dict[str, Any]:
    torch.set_num_threads(1)
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    model = built_model(base, config, plan, world, dtype=dtype, attention=attention)
    startup_checks(model, store, Checkpoint(base), world)
    return trained(model, config.train, store, world, micro_batch_size=plan.micro_batch_size)


def whole(tensors: Mapping[str, torch.Tensor | None], world: World) -> dict[str, torch.Tensor]:
    if world.device.type == "cpu":
        return all_full(tensors)
    return {name: full(tensor).cpu() for name, tensor in tensors.items()}


def trained(
    model: TrainingModel,
    train: TrainConfig,
    store: Any,
    world: World,
    *,
    micro_batch_size: int,
    graphs: Any = None,
) -> dict[str, Any]:
    """Make all steps of a run; return whole tensors on every process.

    graphs: makes those of micro-batches of the model and the world, if any."""
    params = trainable_parameters(model.training)
    initial = whole(params, world)
    optimizer = make_optimizer(model.training, train)
    gradients = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(whole({name: p.grad for name, p in params.items()}, world))
    )
    replayed = graphs and graphs(model.training, world)
    trainer = Trainer.over(
        model.training, optimizer, store, train, micro_batch_size, world, replayed
    )
    metrics = list(trainer.steps(first_step=0, num_steps=train.max_steps))
    return {
        "initial": initial,
        "losses": [m.loss for m in metrics],
        "balance": [m.router_aux_loss for m in metrics],
        "norms": [m.grad_norm for m in metrics],
        "gradients": gradients,
        "weights": whole(params, world),
    }


def save_run(model: TrainingModel, folder: Path, store: TokenStore, world: World) -> None:
    """Write what a run leaves for its export: the adapter in `adapter`, its settings, and the
    record of its logits. Collective."""
    (folder / "adapter").mkdir(parents=True, exist_ok=True)
    save_adapter(model.training, folder / "adapter", world=world)
    logits = trained_logits(model.training, store, device=world.device)
    if world.is_main:
        save_logits(logits, folder / "parity.safetensors")
        write_json(folder / "adapter_config.json", model.adapter_config())


def _trained_rows(model: Any) -> dict[str, list[int]] | None:
    """Return the rows of added tokens, as a base's config.json names them, for PEFT."""
    rows = getattr(model.config, TRAINED_ROWS, None)
    tables = ["embed_tokens", *([] if model.config.tie_word_embeddings else ["lm_head"])]
    return rows and {table: [*range(*rows)] for table in tables}


def stock_peft(
    base: Path,
    lora: LoraSettings,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    model = load_base(Checkpoint(base), device=place, compute_dtype=dtype, attention=attention)
    targets = lora.target_modules
    options = {
        "lora_alpha": lora.alpha,
        "target_modules": targets if isinstance(targets, str) else [*targets],
        "use_rslora": lora.use_rslora,
        "modules_to_save": list(lora.modules_to_save) or None,
        "trainable_token_indices": _trained_rows(model),
    }
    patterns = {"rank_pattern": lora.rank_pattern, "alpha_pattern": lora.alpha_pattern}
    config = LoraConfig(
        r=lora.r, use_dora=lora.use_dora, task_type="CAUSAL_LM", **options, **patterns
    )
    model = get_peft_model(model, config).train()
    return model, trained_by_peft(model)


def trained_by_peft(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return what PEFT trains, by the names of an export."""
    return {
        name.replace(".modules_to_save.default", "")
        .replace(".default", "")
        .replace("magnitude_vector.weight", "magnitude_vector"): param
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def stock_loss(model: Any, batch: MicroBatch, *, reduction: str = "mean") -> torch.Tensor:
    """Return the loss of a stock model, which finds documents by their positions where there is no
    mask."""
    given = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    logits = model(**given, use_cache=False).logits.flatten(0, 1)[batch.positions].float()
    return torch.nn.functional.cross_entropy(logits, batch.targets, reduction=reduction)


def stock(
    base: Path,
    config: RunConfig,
    initial: dict[str, torch.Tensor],
    *,
    rows: int = ROWS,
    seq_len: int = SEQ_LEN,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    model, params = stock_peft(base, config.lora, device=device, dtype=dtype)
    assert params.keys() == initial.keys()
    for name, param in params.items():
        if not any(part in name for part in (".lora_", "magnitude")):  # the base's own
            assert torch.equal(param.detach().cpu(), initial[name].to(param.dtype))
        param.data.copy_(initial[name])
    train, store = config.train, random_store(rows=rows, seq_len=seq_len)
    optimizer = torch.optim.AdamW(
        params.values(),
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
    )
    result = {"losses": [], "norms": [], "gradients": []}
    for step in range(train.max_steps):
        optimizer.param_groups[0]["lr"] = learning_rate(train, step=step, num_steps=train.max_steps)
        chosen = step_rows(
            num_rows=rows, global_batch_size=train.global_batch_size, seed=train.seed, step=step
        )
        loss = stock_loss(model, stored_batch(store, chosen).to(torch.device(device)))
        loss.backward()
        bound = train.max_grad_norm or float("inf")
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(params.values(), bound)))
        result["gradients"].append({name: full(p.grad).cpu() for name, p in params.items()})
        optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(float(loss.detach()))
    return result | {"weights": {name: full(p).cpu() for name, p in params.items()}}
