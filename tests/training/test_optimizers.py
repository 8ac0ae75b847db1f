"""AdamW over shards: equal to the stock ones, also when a run continues from a checkpoint."""

import warnings
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
from workflow.lib.training.checkpoint import CheckpointWriter, resume_
from workflow.lib.training.loop import Trainer, make_optimizer
from workflow.lib.training.optimizers import BITS_AND_PAGED, ShardwiseAdam

KINDS = ["adamw", *BITS_AND_PAGED]
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(7, 80), (176, 3), (131,)]
STEPS, SAVED, IDENTITY = 5, 3, "0123456789ab-cdef01234567"


def values(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def updated(kind: str, world: World) -> list[torch.Tensor]:
    """Three updates of three tensors, sharded over the group."""

    def cut(tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor.to(world.device), world.mesh, [Shard(0)])

    whole = [torch.nn.Parameter(cut(x)) for x in values(0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that on the CPU nothing is paged
        named = {str(number): param for number, param in enumerate(whole)}
        optimizer = ShardwiseAdam(named, kind=kind, **SETTINGS)
    for step in (1, 2, 3):
        optimizer.param_groups[0]["lr"] = 1e-2 / step
        for param, grad in zip(whole, values(step), strict=True):
            param.grad = cut(grad)
        if step > 1:  # an update that is left, and made after all
            for bad in (True, False):
                optimizer.begin(unless=torch.tensor(bad, device=world.device))
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(param, DTensor) for param in whole)
    return [param.full_tensor().detach().cpu() for param in whole]


def reference(kind: str, *, cuts: int, device: str = "cpu") -> list[torch.Tensor]:
    """The same by torch's or bitsandbytes' alone, over the parts that FSDP2 would cut."""
    parts = [
        [torch.nn.Parameter(part.to(device, copy=True)) for part in x.chunk(cuts)]
        for x in values(0)
    ]
    params = [p for group in parts for p in group]
    optimizer: Any = torch.optim.AdamW(params, **SETTINGS)
    if kind in BITS_AND_PAGED:
        bits, _ = BITS_AND_PAGED[kind]
        optimizer = bnb.optim.AdamW(params, optim_bits=bits, min_8bit_size=1, **SETTINGS)
    for step in (1, 2, 3):
        optimizer.param_groups[0]["lr"] = 1e-2 / step
        for group, grad in zip(parts, values(step), strict=True):
            for param, part in zip(group, grad.chunk(cuts), strict=True):
                param.grad = part.to(device).contiguous()
        optimizer.step()
    return [torch.cat(group).detach().cpu() for group in parts]


CONFIG = RunConfig(
    lora=LoraSettings(r=5),
    train=TrainConfig(
        epochs=None,
        max_steps=STEPS,
        global_batch_size=6,
        learning_rate=1e-2,
        optimizer="adamw_8bit",
    ),
)


class Run:
    """A run in this process's group."""

    def __init__(self, base: Path, world: World) -> None:
        self.training = built_model(base, CONFIG, make_plan(), world).training
        self.optimizer = make_optimizer(self.training, CONFIG.train)
        self.world = world

    def train(self, *, first: int, last: int) -> list[float]:
        loop = Trainer(
            self.training,
            self.optimizer,
            random_store(rows=13, seq_len=23),
            CONFIG.train,
            micro_batch_size=1,
            world=self.world,
        ).steps(first_step=first, num_steps=STEPS)
        return [next(loop).loss for _ in range(first, last)]

    def moments(self) -> dict[str, torch.Tensor]:
        """Both moments of this process's shards, decoded."""
        found = {}
        for name, param in trainable_parameters(self.training).items():
            shard = self.optimizer._shards[name]
            state = self.optimizer._inner.state_of(shard) if shard.numel() else {}
            for key, code in (("1", "qmap1"), ("2", "qmap2")) if state else ():
                scales = state[f"absmax{key}"].repeat_interleave(256)
                quantized = state[f"state{key}"]
                decoded = state[code][quantized.long()].flatten() * scales[: quantized.numel()]
                local = decoded.view_as(quantized)
                whole = (
                    DTensor.from_local(
                        local,
                        self.world.mesh,
                        [Shard(0)],
                        shape=param.shape,
                        stride=param.stride(),
                        run_check=False,
                    )
                    if self.world.size > 1
                    else local
                )
                found[f"{name}.{key}"] = whole.full_tensor() if self.world.size > 1 else whole
        return found


def survey(base: Path, folder: Path, device: str = "cpu") -> dict[str, Any]:
    with process_group(device, timeout_s=TIMEOUT_S) as world:
        run = Run(base, world)
        writer = CheckpointWriter(folder / str(world.size), keep=2, identity=IDENTITY, world=world)
        losses = run.train(first=0, last=SAVED)
        writer.save(run.training, run.optimizer, step=SAVED)
        writer.wait()
        moments = run.moments() if world.size == 1 and device == "cpu" else {}
        losses += run.train(first=SAVED, last=STEPS)
        again = Run(base, world)
        there = folder / str(world.size)
        resumed = resume_(there, again.training, again.optimizer, identity=IDENTITY, world=world)
        return {
            "updates": {kind: updated(kind, world) for kind in KINDS},
            "losses": losses,
            "late losses": again.train(first=resumed.step, last=STEPS),
            "moments": moments,
        }


def elsewhere(base: Path, folder: Path) -> dict[str, Any]:
    """Continue a run of three processes alone."""
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        run = Run(base, world)
        there = folder / "3"
        step = resume_(there, run.training, run.optimizer, identity=IDENTITY, world=world).step
        return {"moments": run.moments(), "late losses": run.train(first=step, last=STEPS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimizers")
    quantized(tiny_llama(folder / "original", num_hidden_layers=1), folder / "nf4")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, dict[str, Any]]:
    return {n: run_distributed(survey, folder / "nf4", folder, world_size=n)[0] for n in (1, 3)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [1, 3])
def test_updates_of_shards_equal_those_of_the_stock_optimizer_on_the_same_parts(
    found: dict[int, dict[str, Any]], processes: int, kind: str
) -> None:
    for ours, theirs in zip(
        found[processes]["updates"][kind], reference(kind, cuts=processes), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("processes", [1, 3])
def test_resumed_run_with_moments_of_8_bits_is_the_uninterrupted_one(
    found: dict[int, dict[str, Any]], processes: int
) -> None:
    result = found[processes]
    assert result["late losses"] == result["losses"][SAVED:]


def test_moments_of_8_bits_are_quantized_anew_for_another_number_of_processes(
    found: dict[int, dict[str, Any]], folder: Path
) -> None:
    """Steps of the code are at most 2% of a block's largest value for the first moment, 1% for the
    second; twice half of one.
    """
    (other,) = run_distributed(elsewhere, folder / "nf4", folder, world_size=1)
    expected = found[1]["moments"]
    assert other["moments"].keys() == expected.keys() != set()
    for name, moment in other["moments"].items():
        largest = float(expected[name].abs().max())
        torch.testing.assert_close(moment, expected[name], rtol=0, atol=0.03 * largest)
    torch.testing.assert_close(
        other["late losses"], found[3]["losses"][SAVED:], rtol=2e-3, atol=0.0
    )
