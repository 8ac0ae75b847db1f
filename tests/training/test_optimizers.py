"""Optimizers over shards: equal to the stock ones, also when a run continues from a checkpoint."""

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.built_models import built_model
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.models import quantized, random_store, tiny_llama
from tests.support.plans import make_plan
from workflow.lib.distributed.world import World, process_group
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.settings.optimizers import OPTIMIZERS
from workflow.lib.training.checkpoint import CheckpointWriter, resume_
from workflow.lib.training.loop import Trainer, make_optimizer
from workflow.lib.training.muon import Matrices
from workflow.lib.training.optimizers import BUILDERS, ShardwiseOptimizer

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
# The first two are matrices for Muon, of which it updates no others.
SHAPES = {"x.lora_A.weight": (7, 80), "x.lora_B.weight": (176, 3), "y": (131,), "z": (5, 9)}
MATRICES = {"x.lora_A.weight": 1, "x.lora_B.weight": 1}
STEPS, SAVED, IDENTITY = 5, 3, "0123456789ab-cdef01234567"


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
    optimizer = ShardwiseOptimizer(params, train, matrices=MATRICES)
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


def stock(train, params):
    every = [part for parts in params.values() for part in parts]
    if train.optimizer == "muon":
        of_muon = [part for name in MATRICES for part in params[name]]
        others = [part for name in params if name not in MATRICES for part in params[name]]
        muon = torch.optim.Muon(
            of_muon,
            lr=SETTINGS["lr"],
            weight_decay=SETTINGS["weight_decay"],
            momentum=train.muon_momentum,
            adjust_lr_fn=train.muon_adjust_lr,
        )
        return [muon, torch.optim.AdamW(others, **SETTINGS)]
    if train.optimizer == "adamw_8bit":
        return [bnb.optim.AdamW(every, optim_bits=8, min_8bit_size=1, **SETTINGS)]
    return [torch.optim.AdamW(every, **SETTINGS)]


def reference(train, *, cuts, device="cpu"):
    """The same by the stock optimizers alone, over the parts that FSDP2 would cut; of Muon over
    whole matrices."""

    def parts_of(name, x):
        whole = train.optimizer == "muon" and name in MATRICES
        return [part.to(device, copy=True).contiguous() for part in x.chunk(1 if whole else cuts)]

    params = {
        name: [torch.nn.Parameter(part) for part in parts_of(name, x)]
        for name, x in values(0).items()
    }
    optimizers = stock(train, params)
    for step in (1, 2, 3):
        for name, grad in values(step).items():
            for param, part in zip(params[name], parts_of(name, grad), strict=True):
                param.grad = part
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 1e-2 / step
            optimizer.step()
    return {name: torch.cat(parts).detach().cpu() for name, parts in params.items()}


def config(kind):
    train = train_settings(kind, epochs=None, max_steps=STEPS, global_batch_size=6)
    return RunConfig(lora=LoraSettings(r=5, use_dora=kind == "muon"), train=train)


class Run:
    """A run in this process's group."""

    def __init__(self, base: Path, world: World, kind: str) -> None:
        self.config = config(kind)
        self.training = built_model(base, self.config, make_plan(), world).training
        self.optimizer = make_optimizer(self.training, self.config.train)
        self.world = world

    def train(self, *, first: int, last: int) -> list[float]:
        loop = Trainer(
            self.training,
            self.optimizer,
            random_store(rows=13, seq_len=23),
            self.config.train,
            micro_batch_size=1,
            world=self.world,
        ).steps(first_step=first, num_steps=STEPS)
        return [next(loop).loss for _ in range(first, last)]

    def weights(self) -> list[float]:
        """Return the sums of this process's shards of all that is trained."""
        params = trainable_parameters(self.training).values()
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
        return [float(x.detach().double().sum()) for x in whole]


RUN_KINDS = ("adamw_8bit", "muon")


def one_run(base, folder, world, kind):
    """Train, with a checkpoint in the midst, and continue from it with a new model."""
    run, there = Run(base, world, kind), folder / f"{kind}-{world.size}"
    writer = CheckpointWriter(there, keep=2, identity=IDENTITY, world=world)
    losses = run.train(first=0, last=SAVED)
    writer.save(run.training, run.optimizer, step=SAVED)
    writer.wait()
    losses += run.train(first=SAVED, last=STEPS)
    again = Run(base, world, kind)
    resumed = resume_(there, again.training, again.optimizer, identity=IDENTITY, world=world)
    late = again.train(first=resumed.step, last=STEPS)
    same = again.weights() == run.weights()
    return {"losses": losses, "late losses": late, "same weights": same}


def survey(base, folder, device="cpu"):
    with process_group(device, timeout_s=TIMEOUT_S) as world:
        return {
            "updates": {kind: updated(train_settings(kind), world) for kind in OPTIMIZERS},
            **{
                adjust: updated(train_settings("muon", muon_adjust_lr=adjust), world)
                for adjust in ("match_rms_adamw", "original")
            },
            **{kind: one_run(base, folder, world, kind) for kind in RUN_KINDS},
        }


def elsewhere(base, folder, kind):
    """Continue a run of three processes alone."""
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        run = Run(base, world, kind)
        there = folder / f"{kind}-3"
        step = resume_(there, run.training, run.optimizer, identity=IDENTITY, world=world).step
        return run.train(first=step, last=STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    quantized(tiny_llama(folder / "original", num_hidden_layers=1), folder / "nf4")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return {n: run_distributed(survey, folder / "nf4", folder, world_size=n)[0] for n in (1, 3)}


def test_every_kind_has_a_builder():
    assert BUILDERS.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("processes", [1, 3])
def test_updates_of_shards_equal_those_of_the_stock_optimizer(found, processes, kind):
    train = train_settings(kind)
    expected = reference(train, cuts=processes)
    for name, ours in found[processes]["updates"][kind].items():
        if kind != "muon" or name not in MATRICES:
            torch.testing.assert_close(ours, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("processes", [1, 3])
def test_muon_rounds_no_more_than_torch_does(found, processes, adjust):
    """Both iterate in bfloat16; against the same in float64."""
    train = train_settings("muon", muon_adjust_lr=adjust)
    stock, ours = reference(train, cuts=processes), found[processes][adjust]
    for name in MATRICES:
        exact = exact_muon(name, train)
        lost = float((stock[name] - exact).abs().max())
        assert 0 < lost < 0.1 * float((exact - values(0)[name]).abs().max())
        torch.testing.assert_close(ours[name].double(), exact, rtol=0.0, atol=2 * lost)


def exact_muon(name, train):
    """Return a matrix after three updates by Muon, in float64."""
    weight, momentum = values(0)[name].double(), torch.zeros(SHAPES[name], dtype=torch.float64)
    rows, columns = SHAPES[name]
    ratio = 0.2 * max(rows, columns) ** 0.5
    if train.muon_adjust_lr == "original":
        ratio = max(1.0, rows / columns) ** 0.5
    for step in (1, 2, 3):
        gradient, rate = values(step)[name].double(), 1e-2 / step
        momentum = train.muon_momentum * momentum + (1 - train.muon_momentum) * gradient
        x = (1 - train.muon_momentum) * gradient + train.muon_momentum * momentum
        x = x / x.norm()
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        weight = weight * (1 - rate * train.weight_decay) - rate * ratio * x
    return weight


def test_updates_of_muon_do_not_depend_on_the_number_of_processes(found):
    for name in MATRICES:
        assert torch.equal(*(found[n]["updates"]["muon"][name] for n in (1, 3)))


def test_adapters_of_a_stack_are_one_matrix_for_each_expert():
    """A of 3 experts one below the other; of their B columns alternate."""
    a, b = torch.arange(6 * 4.0).view(6, 4), torch.arange(5 * 6.0).view(5, 6)
    below, alternating = Matrices(3), Matrices(3, in_columns=True)
    torch.testing.assert_close(below.apart(a)[1], a[2:4])
    torch.testing.assert_close(alternating.apart(b)[1], b[:, 1::3])
    for form, whole in ((below, a), (alternating, b)):
        assert torch.equal(form.together(form.apart(whole), like=whole.shape), whole)


@pytest.mark.parametrize("kind", RUN_KINDS)
@pytest.mark.parametrize("processes", [1, 3])
def test_resumed_run_is_the_uninterrupted_one(found, processes, kind):
    result = found[processes][kind]
    assert result["late losses"] == result["losses"][SAVED:]
    assert result["same weights"]


@pytest.mark.parametrize(("kind", "rtol"), [("adamw_8bit", 2e-3), ("muon", 1e-5)])
def test_run_goes_on_with_another_number_of_processes(found, folder, kind, rtol):
    """Moments of 8 bits are quantized anew, at most half a step of their code away."""
    (late,) = run_distributed(elsewhere, folder / "nf4", folder, kind, world_size=1)
    torch.testing.assert_close(late, found[3][kind]["losses"][SAVED:], rtol=rtol, atol=0.0)
