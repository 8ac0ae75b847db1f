"""Optimizers over shards: equal to the stock ones, also when a run continues from a checkpoint."""

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.checkpointing import IDENTITY, Run
from tests.support.distributed import run_in_group
from tests.support.gathering import full
from tests.support.models import quantized, random_llama, tiny_llama
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.settings.optimizer_kinds import OPTIMIZERS
from workflow.lib.training.checkpoint import CheckpointWriter
from workflow.lib.training.optimizers import KINDS, ShardwiseOptimizer

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = {"x.lora_A.weight": (7, 80), "x.lora_B.weight": (176, 3), "y": (131,), "z": (5, 9)}
STEPS, SAVED = 5, 3


def train_settings(kind, **more):
    return TrainConfig(
        optimizer=kind,
        learning_rate=SETTINGS["lr"],
        adam_beta2=SETTINGS["betas"][1],
        weight_decay=SETTINGS["weight_decay"],
        **more,
    )


def values(number):
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def updated(train, world):
    def cut(tensor):
        return distribute_tensor(tensor.to(world.device), world.mesh, [Shard(0)])

    params = {name: torch.nn.Parameter(cut(x)) for name, x in values(0).items()}
    optimizer = ShardwiseOptimizer(params, train)
    for step in (1, 2, 3):
        optimizer.param_groups[0]["lr"] = 1e-2 / step
        for name, grad in values(step).items():
            params[name].grad = cut(grad)
        if step > 1:  # an update that is left, and made after all
            for bad in (True, False):
                optimizer.begin(unless=torch.tensor(bad, device=world.device))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.full_tensor().detach().cpu() for name, param in params.items()}


def stock(kind, params):
    every = [part for parts in params.values() for part in parts]
    if kind == "adamw_8bit":
        return bnb.optim.AdamW(every, optim_bits=8, min_8bit_size=1, **SETTINGS)
    return torch.optim.AdamW(every, **SETTINGS)


def reference(kind, *, cuts, device="cpu"):
    """The same by the stock optimizer alone, over the parts that FSDP2 would cut."""

    def parts_of(x):
        return [part.to(device, copy=True).contiguous() for part in x.chunk(cuts)]

    params = {
        name: [torch.nn.Parameter(part) for part in parts_of(x)] for name, x in values(0).items()
    }
    optimizer = stock(kind, params)
    for step in (1, 2, 3):
        for name, grad in values(step).items():
            for param, part in zip(params[name], parts_of(grad), strict=True):
                param.grad = part
        optimizer.param_groups[0]["lr"] = 1e-2 / step
        optimizer.step()
    return {name: torch.cat(parts).detach().cpu() for name, parts in params.items()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_lora_plus_updates_as_that_of_peft(kind):
    """B matrices and lengths of rows (DoRA) take the higher rate."""
    train = TrainConfig(optimizer=kind, learning_rate=1e-2, loraplus_lr_ratio=16)
    model, stock_model = (in_peft() for _ in range(2))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    eight_bits = {"optim_bits": 8, "min_8bit_size": 1}
    of_library = {"adamw": (torch.optim.AdamW, {}), "adamw_8bit": (bnb.optim.AdamW, eight_bits)}
    kind_of, arguments = of_library[kind]
    ours = ShardwiseOptimizer(trained, train)
    theirs = create_loraplus_optimizer(
        stock_model, kind_of, lr=1e-2, loraplus_lr_ratio=16, **arguments
    )
    for optimizer, module in ((ours, model), (theirs, stock_model)):
        for number, param in enumerate(p for p in module.parameters() if p.requires_grad):
            generator = torch.Generator().manual_seed(number)
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    expected = dict(stock_model.named_parameters())
    assert {"lora_A", "lora_B", "lora_magnitude_vector", "modules_to_save"} <= {
        part for name in trained for part in name.split(".")
    }
    for name, param in trained.items():
        torch.testing.assert_close(param, expected[name], rtol=1e-6, atol=1e-8, msg=name)


def in_peft():
    torch.manual_seed(0)
    config = LoraConfig(
        r=2, use_dora=True, target_modules="all-linear", modules_to_save=["lm_head"]
    )
    return get_peft_model(random_llama(num_hidden_layers=1), config)


CONFIG = RunConfig(
    lora=LoraSettings(r=5, use_dora=True),
    train=train_settings("adamw_8bit", epochs=None, max_steps=STEPS, global_batch_size=6),
)


def made(base, world):
    """A run with moments in 8 bits in this process's group."""
    return Run(base, world, CONFIG, micro_batch_size=1)


def weights(run):
    params = trainable_parameters(run.training)
    return {name: full(param) for name, param in params.items()}


def one_run(base, folder, world):
    """Train, with a checkpoint in the midst, and continue from it with a new model."""
    run, there = made(base, world), folder / f"of-{world.size}"
    writer = CheckpointWriter(there, keep=2, identity=IDENTITY, world=world)
    losses = run.train(first=0, last=SAVED)
    writer.save(run.training, run.optimizer, step=SAVED)
    writer.wait()
    losses += run.train(first=SAVED, last=STEPS)
    again = made(base, world)
    late = again.train(first=again.resume(there).step, last=STEPS)
    theirs = weights(run)
    same = all(tensor.equal(theirs[name]) for name, tensor in weights(again).items())
    return {"losses": losses, "late losses": late, "same weights": same}


def survey(world, base, folder):
    return {
        "updates": {kind: updated(train_settings(kind), world) for kind in OPTIMIZERS},
        "run": one_run(base, folder, world),
    }


def elsewhere(world, base, folder):
    """Continue a run of three processes alone."""
    run = made(base, world)
    return run.train(first=run.resume(folder / "of-3").step, last=STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    quantized(tiny_llama(folder / "original", num_hidden_layers=1), folder / "nf4")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return {n: run_in_group(survey, folder / "nf4", folder, world_size=n)[0] for n in (1, 3)}


def test_every_kind_is_built():
    assert KINDS.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("processes", [1, 3])
def test_updates_of_shards_equal_those_of_the_stock_optimizer(found, processes, kind):
    expected = reference(kind, cuts=processes)
    for name, ours in found[processes]["updates"][kind].items():
        torch.testing.assert_close(ours, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("processes", [1, 3])
def test_resumed_run_is_the_uninterrupted_one(found, processes):
    result = found[processes]["run"]
    assert result["late losses"] == result["losses"][SAVED:]
    assert result["same weights"]


def test_run_goes_on_with_another_number_of_processes(found, folder):
    """Moments of 8 bits are quantized anew, at most half a step of their code away."""
    (late,) = run_in_group(elsewhere, folder / "nf4", folder, world_size=1)
    torch.testing.assert_close(late, found[3]["run"]["losses"][SAVED:], rtol=2e-3, atol=0.0)
