"""Adapters that stock PEFT has made are continued: the same values, the same first loss, on any
number of processes."""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.gathering import all_full
from tests.support.mixtures import tiny_mixture
from tests.support.models import quantized, random_store, stock_base, tiny_llama
from tests.support.plans import make_plan
from tests.support.refusals import refusal
from tests.support.stock_training import stock_loss
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.adapter_config import adapter_settings, read_adapter_config
from workflow.lib.checkpoints.files.model_files import ADAPTER_WEIGHTS
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.config import RunConfig, TrainConfig
from workflow.lib.settings.schedule import step_rows
from workflow.lib.system.files import read_json, write_json
from workflow.lib.training.batches import stored_batch
from workflow.lib.training.loop import Trainer, make_optimizer
from workflow.lib.training.start_adapter import names_in_class, plain_name
from workflow.lib.training.startup_checks import startup_checks

BATCH, ROWS, SEQ_LEN, CPU = 6, 7, 19, torch.device("cpu")
TRAIN = TrainConfig(
    epochs=None, max_steps=1, global_batch_size=BATCH, max_grad_norm=None, start_from="them"
)


@dataclass(frozen=True)
class Kind:
    """An adapter of stock PEFT; `rest`: of its configuration; `tables`: with the base's beside."""

    model: str = "llama"
    tables: bool = False
    dtype: torch.dtype = torch.float32
    rest: dict[str, Any] = field(default_factory=dict)


ONE_BY_ONE = "experts one by one"  # as with Transformers 4
KINDS = {
    "names": Kind(dtype=torch.bfloat16, rest={"target_modules": ["q_proj", "v_proj"]}),
    "tables of the base": Kind(rest={"target_modules": ["q_proj"]}, tables=True),
    "dora and head": Kind(
        rest={"target_modules": "all-linear", "use_dora": True, "modules_to_save": ["lm_head"]}
    ),
    "some layers": Kind(
        dtype=torch.float16,
        rest={
            "target_modules": ["q_proj", "mlp.down_proj", "v_proj"],
            "exclude_modules": ["v_proj"],
            "layers_to_transform": [0, 2],
            "layers_pattern": "layers",
            "rank_pattern": {r"layers.2.self_attn.q_proj": 7},
            "use_rslora": True,
        },
    ),
    "experts and routers": Kind(
        model="deepseek_v3",
        rest={
            "target_modules": ["o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "modules_to_save": ["mlp.gate"],
        },
    ),
    ONE_BY_ONE: Kind(
        model="qwen3_moe", rest={"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
    ),
}  # fmt: skip


def stock_of_kind(folder, kind):
    base = folder / kind.model
    return stock_base(base)


@torch.no_grad()
def make_adapter(folder, name):
    """Let stock PEFT make an adapter with an effect, in the kind's type."""
    kind = KINDS[name]
    config = LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **kind.rest)
    model = get_peft_model(stock_of_kind(folder, kind), config)
    torch.manual_seed(1)
    for param in model.parameters():
        if param.requires_grad:
            param.add_(torch.randn_like(param), alpha=0.03)
    model.save_pretrained(str(folder / name), save_embedding_layers=kind.tables or "auto")
    path = folder / name / ADAPTER_WEIGHTS
    if name == ONE_BY_ONE:
        divide_experts(folder / name)
        return
    save_file({n: t.to(kind.dtype) for n, t in load_file(path).items()}, path)


def divide_experts(adapter):
    """Write an adapter as PEFT wrote it when each projection of an expert was a module."""
    tensors = {n: t for n, t in load_file(adapter / ADAPTER_WEIGHTS).items() if "q_proj" in n}
    sizes = {"gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}
    for layer, expert, (name, (rows, columns)) in product(range(2), range(11), sizes.items()):
        path = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
        tensors[f"{path}.lora_A.weight"] = 0.1 * torch.randn(4, columns)
        tensors[f"{path}.lora_B.weight"] = 0.1 * torch.randn(rows, 4)
    save_file(tensors, adapter / ADAPTER_WEIGHTS)
    config = read_json(adapter / "adapter_config.json")
    changes = {**KINDS[ONE_BY_ONE].rest, "target_parameters": None}
    changes |= {"rank_pattern": {}, "alpha_pattern": {}}
    write_json(adapter / "adapter_config.json", config | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    quantized(tiny_llama(folder / "original"), folder / "llama")
    tiny_mixture("deepseek_v3", folder / "original-mixture")
    quantized(folder / "original-mixture", folder / "deepseek_v3")
    quantized(tiny_mixture("qwen3_moe", folder / "original-qwen"), folder / "qwen3_moe")
    for name in KINDS:
        make_adapter(folder, name)
    return folder


def settings_of(adapter):
    return RunConfig(lora=adapter_settings(read_adapter_config(adapter), adapter), train=TRAIN)


def build(folder, name, adapter, world):
    return built_model(
        folder / KINDS[name].model, settings_of(folder / name), make_plan(), world, start=adapter
    )


def first_steps(world, folder):
    """Return the values that every kind starts with, whole, and its first loss; the checks before
    the first step hold."""
    found = {}
    for name in KINDS:
        kind = KINDS[name].model
        model = build(folder, name, folder / name, world)
        startup_checks(
            model, random_store(rows=ROWS, seq_len=SEQ_LEN), Checkpoint(folder / kind), world
        )
        values = all_full(trainable_parameters(model.training))
        trainer = Trainer.over(
            model.training,
            make_optimizer(model.training, TRAIN),
            random_store(rows=ROWS, seq_len=SEQ_LEN),
            TRAIN,
            micro_batch_size=BATCH // world.size,
            world=world,
        )
        (step,) = trainer.steps(first_step=0, num_steps=1)
        found[name] = values, step.loss
    return found


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda n: f"{n} processes")
def started(request, folder):
    return run_in_group(first_steps, folder, world_size=request.param)[0]


@pytest.mark.parametrize("name", [name for name in KINDS if name != ONE_BY_ONE])
def test_masters_are_exactly_the_files_values(folder, started, name):
    values, _ = started[name]
    stored = load_file(folder / name / ADAPTER_WEIGHTS)
    own = {n for n in stored if n.endswith("correction_bias")}  # no gradient reaches it
    own |= {n for n in stored if KINDS[name].tables and ".lora_" not in n}
    assert len(values) == len(stored) - len(own)
    # A stack has another name in training, so tensors are told apart by their values.
    left = [t.float() for n, t in stored.items() if n not in own]
    for value in values.values():
        assert value.dtype == torch.float32
        index = next(i for i, t in enumerate(left) if torch.equal(t, value))
        del left[index]


@pytest.mark.parametrize("name", KINDS)
def test_first_loss_is_that_of_stock_peft(folder, started, name):
    model = PeftModel.from_pretrained(stock_of_kind(folder, KINDS[name]), str(folder / name))
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    chosen = step_rows(num_rows=ROWS, global_batch_size=BATCH, seed=TRAIN.seed, step=0)
    loss = float(stock_loss(model, stored_batch(store, chosen)).detach())
    # fp32 on both sides, sums in another order
    assert started[name][1] == pytest.approx(loss, rel=2e-5)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "base_model.model._orig_mod.model.layers.0._checkpoint_wrapped_module.self_attn.q_proj"
        ".lora_A.weight",
    ],
)
def test_names_of_other_exports_are_pefts(name):
    assert plain_name(name) == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def test_names_of_whole_modules_and_magnitudes_are_pefts():
    head = "base_model.model.lm_head.modules_to_save.default.weight"
    assert plain_name(head) == "base_model.model.lm_head.weight"
    assert plain_name("a.lora_magnitude_vector.default.weight").endswith(".lora_magnitude_vector")


def test_names_of_another_class_of_the_model_are_found_by_their_layers():
    part = "layers.0.self_attn.q_proj.lora_A.weight"
    places = [f"base_model.model.model.language_model.{part}", "base_model.model.lm_head.weight"]
    theirs = [f"base_model.model.language_model.model.{part}", places[1]]
    assert names_in_class(dict(zip(theirs, "ab", strict=True)), places) == dict(
        zip(places, "ab", strict=True)
    )


def test_names_that_layers_do_not_tell_apart_stay():
    part = "layers.0.self_attn.q_proj.lora_A.weight"
    theirs = {f"base_model.model.{tower}.{part}": tower for tower in ("vision", "text")}
    assert names_in_class(theirs, [f"base_model.model.model.{part}"]) == theirs


def change(tensors, how):
    first = min(tensors)
    tensor = tensors.pop(first)
    changed = {
        "left over": {first: tensor, "base_model.model.lm_head.weight": torch.zeros(3, 5)},
        "missing": {},
        "shape": {first: tensor[:2].clone()},
        "type": {first: tensor.to(torch.float64)},
        "finite": {first: tensor * float("nan")},
        "twice": {first: tensor, first.removeprefix("base_model.model."): tensor.clone()},
    }
    tensors |= changed[how]


def refused(world, folder, changed):
    return {
        how: refusal(build, folder, "names", adapter, world) for how, adapter in changed.items()
    }


def test_every_tensor_that_does_not_fit_is_named(folder, tmp_path):
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    expected = {
        "left over": "nothing is trained in the model at: base_model.model.lm_head.weight",
        "missing": f"the file lacks: {first}",
        "shape": f"of another shape: {first} (2, 80), in the model (4, 80)",
        "type": f"of a type that fp32 cannot hold: {first} (F64)",
        "finite": f"{first} is not finite",
        "twice": "are one tensor",
    }
    for how in expected:
        tensors = load_file(folder / "names" / ADAPTER_WEIGHTS)
        change(tensors, how)
        (tmp_path / how).mkdir()
        save_file(tensors, tmp_path / how / ADAPTER_WEIGHTS)
    changed = {how: tmp_path / how for how in expected}
    (messages,) = run_in_group(refused, folder, changed, world_size=1)
    for how, text in expected.items():
        assert messages[how].startswith("train.start_from = 'them': ")
        assert text in messages[how]
