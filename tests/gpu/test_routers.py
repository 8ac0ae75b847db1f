"""Trained routers and their load-balancing loss on GPUs: as CUDA graphs, and over several."""

from functools import partial

import pytest
import torch

from tests.support.distributed import run_in_group
from tests.support.mixtures import tiny_mixture
from tests.support.models import base_fixture, random_store
from tests.support.router_runs import COEFFICIENT, ROWS, SEQ_LEN, config, router, train
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs

pytestmark = pytest.mark.gpu
FAMILY = "qwen3_moe"


base = base_fixture(partial(tiny_mixture, FAMILY))


def run_in(world, base, graphed):
    device = world.device.type
    settings = config(
        FAMILY,
        train={"router_aux_loss_coef": COEFFICIENT, "max_grad_norm": None},
        target_modules="all-linear",
    )
    store, off = random_store(rows=ROWS, seq_len=SEQ_LEN), []

    def graphs(training, world):
        made = MicroBatchGraphs(training, world)
        off.append(made)
        return made

    result = train(
        base, settings, store, world, micro_batches=2,
        plan={"device": device, "cuda_graphs": graphed}, graphs=graphs if graphed else None,
        attention="sdpa" if device == "cpu" else "varlen",
        dtype=torch.float32 if device == "cpu" else torch.bfloat16,
    )  # fmt: skip
    moved = {name: x - result["initial"][name] for name, x in result["weights"].items()}
    numbers = {name: result[name] for name in ("losses", "balance", "norms")}
    routers = {name: x.cpu() for name, x in moved.items() if f".{router(FAMILY)}." in name}
    return numbers | {"routers": routers, "off": [x.off for x in off]}


@pytest.mark.parametrize("processes", [1, 2])
def test_graphs_make_the_run_that_python_makes(base, enough_gpus, processes):
    plain, graphed = (
        run_in_group(run_in, base, on, world_size=processes, device="cuda") for on in (False, True)
    )
    for one, other in zip(plain, graphed, strict=True):
        assert other["off"] == [None]
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-3)
        assert other["balance"] == pytest.approx(one["balance"], rel=1e-3)
        assert other["norms"] == pytest.approx(one["norms"], rel=2e-2)
        assert all(x.any() for x in other["routers"].values())


@pytest.mark.parametrize("processes", [1, 2])
def test_balance_in_bf16_is_near_that_of_the_cpu_in_fp32(base, enough_gpus, processes):
    (exact,) = run_in_group(run_in, base, False, world_size=1)
    for found in run_in_group(run_in, base, False, world_size=processes, device="cuda"):
        # a rounding may send a token to another expert
        assert found["balance"] == pytest.approx(exact["balance"], rel=5e-2)
        assert found["losses"] == pytest.approx(exact["losses"], rel=2e-2)
