"""The training engine against a plain single-process loop of stock bitsandbytes and stock PEFT."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.finished import arguments, finetune, prepare
from tests.support.models import quantized, random_store, tiny_llama
from tests.support.plans import make_plan
from tests.system.test_checksums import flip, flip_tensor
from workflow.lib.export.stock_models import decode_partial_rows_
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.settings.schedule import learning_rate, step_rows
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_checked_json

STEPS = 3  # the third begins the second pass over the rows
ROWS, SEQ_LEN, BATCH = 10, 37, 4
# fp32 on both sides; the sums differ in order (per process, per chunk, fused products). Losses are
# of order 1, gradients of order 0.01 to 1; 2e-5 relative is about 100 units in the last place.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


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
    base: Path,
    config: RunConfig,
    plan: StepPlan,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> dict[str, Any]:
    """Train in this process's group; return losses, norms, and per step the full adapter gradients
    and weights.
    """
    from workflow.lib.distributed.world import process_group

    with process_group(plan.device, timeout_s=TIMEOUT_S, shard_size=plan.shards) as world:
        return trained(base, config, plan, world, dtype, attention)


def ours_on_each(bases: dict[str, Path], config: RunConfig, plan: StepPlan) -> dict[str, Any]:
    """The same on several bases in turn, by name."""
    from workflow.lib.distributed.world import process_group

    with process_group(plan.device, timeout_s=TIMEOUT_S, shard_size=plan.shards) as world:
        return {
            name: trained(base, config, plan, world, torch.float32, "sdpa")
            for name, base in bases.items()
        }


def trained(
    base: Path, config: RunConfig, plan: StepPlan, world: Any, dtype: torch.dtype, attention: str
) -> dict[str, Any]:
    """What `ours` returns, of a group that has been joined."""
    from tests.support.built_models import built_model
    from workflow.lib.model.lora import trainable_parameters
    from workflow.lib.training.loop import Trainer, make_optimizer
    from workflow.lib.training.startup_checks import startup_checks

    torch.set_num_threads(1)
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    model = built_model(base, config, plan, world, dtype=dtype, attention=attention)
    startup_checks(model, store, base, world)
    optimizer = make_optimizer(model.training, config.train)
    gradients: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(
            {n: full(p.grad) for n, p in trainable_parameters(model.training).items()}
        )
    )
    initial = {n: full(p) for n, p in trainable_parameters(model.training).items()}
    metrics = list(
        Trainer(
            model.training,
            optimizer,
            store,
            config.train,
            micro_batch_size=plan.micro_batch_size,
            world=world,
        ).steps(first_step=0, num_steps=STEPS)
    )
    return {
        "losses": [m.loss for m in metrics],
        "norms": [m.grad_norm for m in metrics],
        "initial": initial,
        "gradients": gradients,
        "final": {n: full(p) for n, p in trainable_parameters(model.training).items()},
    }


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().clone()


def stock(
    base: Path,
    config: RunConfig,
    initial: dict[str, torch.Tensor],
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """The reference: Linear4bit, PEFT, torch cross-entropy, one process, one row at a time,
    documents apart.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, device_map={"": device})
    cast_unquantized_(model, dtype)
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = dtype
            module.weight.quant_state.dtype = dtype
            module.support_avx512bf16_for_cpu = False
    decode_partial_rows_(model)
    model = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    params = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    assert params.keys() == initial.keys()
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(initial[name])
    model.train()
    train, store = config.train, random_store(rows=ROWS, seq_len=SEQ_LEN)
    optimizer = torch.optim.AdamW(
        params.values(), betas=(train.adam_beta1, train.adam_beta2), weight_decay=train.weight_decay
    )
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step=step, num_steps=STEPS)
        rows = step_rows(num_rows=ROWS, global_batch_size=BATCH, seed=train.seed, step=step)
        loss = sum(row_loss(model, store, int(row)) for row in rows) / int(
            store.loss_mask[rows].sum()
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), train.max_grad_norm)
        result["gradients"].append({n: full(p.grad) for n, p in params.items()})
        optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(float(loss.detach()))
        result["norms"].append(float(norm))
    return result | {"final": {n: full(p) for n, p in params.items()}}


def cast_unquantized_(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Transformers leaves the tensors of a pre-quantized checkpoint in the type of the file."""
    for param in model.parameters():
        if not isinstance(param, bnb.nn.Params4bit):
            param.data = param.data.to(dtype)


def row_loss(model: torch.nn.Module, store: Any, row: int) -> torch.Tensor:
    """Summed loss of one packed row, every document in a forward of its own."""
    starts = [*(store.position_ids[row] == 0).nonzero()[0], SEQ_LEN]
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for start, stop in itertools.pairwise(starts):
        ids = torch.from_numpy(store.input_ids[row, start:stop].astype("int64")).to(device)
        mask = torch.from_numpy(store.loss_mask[row, start:stop].copy()).to(device)
        if mask.any():
            logits = model(input_ids=ids[None]).logits[0].float()
            total = total + torch.nn.functional.cross_entropy(
                logits[:-1][mask[1:]], ids[1:][mask[1:]], reduction="sum"
            )
    return total


# Processes, and how many of them share a copy of the model.
GROUPS = {
    "1 process": (1, 1),
    "2 processes": (2, 2),
    "2 replicas on 2 processes each": (4, 2),
}
BASES = {"untied": False, "tied": True}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {
        name: quantized(
            tiny_llama(folder / name / "original", tied=tied),
            folder / name / "nf4",
        )
        for name, tied in BASES.items()
    }


@pytest.fixture(scope="module")
def results(bases: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What the first process of each group found, by group and base."""
    found = {}
    for group, (processes, shard_size) in GROUPS.items():
        planned = plan(
            processes=processes,
            micro_batch_size=2 if processes == 1 else 1,
            replicas=processes // shard_size,
        )
        args = (ours_on_each, bases, settings(), planned)
        found[group] = run_distributed(*args, world_size=processes)[0]
    return found


@pytest.fixture(scope="module")
def references(
    bases: dict[str, Path], results: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The stock loop on each base, from the initial values that all groups have."""
    return {
        name: stock(base, settings(), results["1 process"][name]["initial"])
        for name, base in bases.items()
    }


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("group", GROUPS)
def test_losses_gradients_and_weights_equal_those_of_a_stock_single_process_loop(
    results: dict[str, dict[str, Any]],
    references: dict[str, dict[str, Any]],
    group: str,
    base: str,
) -> None:
    result, reference = results[group][base], references[base]
    initial = results["1 process"][base]["initial"]
    torch.testing.assert_close(result["initial"], initial, rtol=0, atol=0)
    torch.testing.assert_close(result["losses"], reference["losses"], **TOLERANCE)
    torch.testing.assert_close(result["norms"], reference["norms"], **TOLERANCE)
    for step in range(STEPS):
        torch.testing.assert_close(
            result["gradients"][step], reference["gradients"][step], **TOLERANCE
        )


def refused_training(folder: Path) -> str:
    """Be a worker of the stage, on files that were damaged before; return the message."""
    try:
        finetune(arguments(folder))
    except UserError as error:
        return str(error)
    return "no error"


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    prepare(tmp_path)
    return tmp_path


def flip_weight(folder: Path) -> Path:
    return flip_tensor(folder / "base", "model.layers.1.mlp.up_proj.weight")


def change_setting(folder: Path) -> Path:
    path = folder / "base" / "config.json"
    text = path.read_text()
    assert text.count('"rms_norm_eps": 1e-06') == 1
    path.write_text(text.replace("1e-06", "9e-06"))
    return path


def flip_byte(name: str, place: int) -> Callable[[Path], Path]:
    def damage(folder: Path) -> Path:
        flip(folder / name, place)
        return folder / name

    return damage


DAMAGES = {  # all of which open as before, and train to the end
    "packed weight": flip_weight,
    "setting of the base": change_setting,
    "token": flip_byte("tokens/train.input_ids.npy", -4),
    "position": flip_byte("tokens/train.position_ids.npy", -4),
    "loss mask": flip_byte("tokens/train.loss_mask.npy", -1),
    "held-out token": flip_byte("tokens/heldout.input_ids.npy", -4),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_bit_of_base_or_tokens_stops_all_processes_before_the_model_is_loaded(
    prepared: Path, damage: str
) -> None:
    path = DAMAGES[damage](prepared)
    messages = run_distributed(refused_training, prepared, world_size=2)
    assert set(messages) == {
        f"{path} is damaged: it does not have the SHA-256 that was recorded when it was made. "
        f"Delete the folder {path.parent} and repeat the command; the folder is made again."
    }
    assert not (prepared / "finetune").exists()
    assert list((prepared / "checkpoints").glob("*/step-*")) == []


def test_summary_tells_that_the_files_were_compared_with_their_record(prepared: Path) -> None:
    run_distributed(finetune, arguments(prepared), world_size=2)
    first, *others = read_checked_json(prepared / "finetune" / "summary.json")["checks"]
    files = [*(prepared / "base").glob("*[!S]"), *(prepared / "tokens").glob("*.npy")]
    assert first == {
        "name": "base and tokens have their recorded SHA-256",
        "passed": True,
        "detail": f"{len(files)} files, {sum(p.stat().st_size for p in files):,} bytes",
    }
    assert any("gathered bytes equal checkpoint bytes" in check["name"] for check in others)
