"""Micro-batches as CUDA graphs, on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stages.test_finetune import ROWS, SEQ_LEN, full, settings
from tests.support.distributed import run_distributed
from tests.support.models import quantized, random_store, tiny_llama
from tests.support.plans import make_plan

pytestmark = pytest.mark.gpu

STEPS = 6
KINDS = {
    "plain": {},
    "recomputed, dropout": {"dropout": 0.1},
    "float8": {"products": "float8"},
    "kept in float8": {"saved_activations": "float8"},
}


def trained(base: Path, levers: dict[str, Any], graphed: str, attention: str) -> dict[str, Any]:
    """Train in this process; graphed: `no`, `yes`, or `layout`: as graphs do, but launched by
    Python.
    """
    from workflow.lib.distributed.world import process_group
    from workflow.lib.model.lora import trainable_parameters
    from workflow.lib.training.build import Numerics, build_training_model
    from workflow.lib.training.loop import Trainer, make_optimizer
    from workflow.lib.training.micro_batch_graphs import CudaCapture, MicroBatchGraphs

    torch.use_deterministic_algorithms(True)
    config = settings()
    lora = config.lora.model_copy(update={"dropout": levers.get("dropout", 0.0)})
    saved = {"saved_activations": levers.get("saved_activations", "compute_dtype")}
    train = config.train.model_copy(update=saved)
    config = config.model_copy(update={"lora": lora, "train": train})
    plan = make_plan(
        device="cuda", micro_batch_size=2, num_steps=STEPS, compute_dtype="bfloat16",
        activation_checkpointing="dropout" in levers,
    )  # fmt: skip
    with process_group("cuda", timeout_s=120.0) as world:
        numerics = Numerics(torch.bfloat16, attention, levers.get("products", "compute_dtype"))
        model = build_training_model(base, config, plan, world, numerics=numerics)
        capture = CudaCapture if graphed == "yes" else lambda: lambda function: function
        graphs = None if graphed == "no" else MicroBatchGraphs(model.training, capture)
        store = random_store(rows=ROWS, seq_len=SEQ_LEN)
        optimizer = make_optimizer(model.training, config.train)
        trainer = Trainer(model.training, optimizer, store, config.train, 2, world, graphs)
        found = []
        for metrics in trainer.steps(first_step=0, num_steps=STEPS):
            found.append((metrics.loss, metrics.grad_norm))
            if metrics.step == STEPS // 2:
                trainer.release_graphs()
        final = {n: full(p) for n, p in trainable_parameters(model.training).items()}
    return {"metrics": found, "final": final, "off": graphs.off if graphs else None}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    # 8 bits need whole blocks of 64
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
    return quantized(tiny_llama(folder / "original", **sizes), folder / "nf4")


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_bit_equal_to_the_same_kernels_launched_one_by_one(
    base: Path, one_gpu: int, kind: str
) -> None:
    found = {
        graphed: run_distributed(trained, base, KINDS[kind], graphed, "varlen", world_size=1)[0]
        for graphed in ("no", "layout", "yes")
    }
    assert found["yes"]["off"] is None
    assert found["yes"]["metrics"] == found["layout"]["metrics"]
    for name, weight in found["layout"]["final"].items():
        assert torch.equal(weight, found["yes"]["final"][name]), name
    (losses, norms), (same_losses, same_norms) = (
        zip(*found[graphed]["metrics"], strict=True) for graphed in ("no", "yes")
    )
    assert losses == pytest.approx(same_losses, rel=2e-2)
    assert norms[0] == pytest.approx(same_norms[0], rel=2e-2)  # later weights differ by rounding
