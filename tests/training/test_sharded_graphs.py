"""Several processes capture and replay the same micro-batches; on a CPU a capture is the function
itself.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.captures import BreaksOff, Captures
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.models import random_store
from tests.support.plans import make_plan
from tests.support.training_loops import CLIP, ROWS, SEQ_LEN, STEPS, full, settings
from workflow.lib.distributed import vocabulary_parallel
from workflow.lib.distributed.world import process_group
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.nf4_model import local
from workflow.lib.training.build import Numerics, build_training_model
from workflow.lib.training.loop import Trainer, make_optimizer
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs

PROCESSES, NUM_STEPS = 2, STEPS + 2
KINDS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "weights kept to backward": {"reshard_after_forward": False},
    "embedding on the host": {"offload_embedding": True},
    "replicas": {"shard_size": 1},
    "activations on the host": {"offload_activations": True, "offload_window_bytes": 4096},
}


def trained(
    base: Path, levers: dict[str, Any], graphed: bool, failing: int, breaks: str | None
) -> dict[str, Any]:
    """Train in this process; failing: the rank that cannot capture; breaks: where all captures
    break off, `forward` or `backward`.
    """
    asked, ask = [0], vocabulary_parallel.largest_count

    def counted(count: int) -> int:
        asked[0] += 1
        return ask(count)

    vocabulary_parallel.largest_count = counted  # this process ends with the call
    config, plan = settings(max_grad_norm=CLIP, max_steps=NUM_STEPS), make_plan(**levers)
    shard_size = levers.get("shard_size")
    with process_group("cpu", timeout_s=TIMEOUT_S, shard_size=shard_size) as world:
        numerics = Numerics(torch.float32, "sdpa")
        training = build_training_model(base, config, plan, world, numerics=numerics).training
        captures: Any = Captures(fails=world.rank == failing)
        if breaks is not None:
            layer = training.peft_model.get_base_model().model.layers[1]
            captures = BreaksOff(training, layer, backward=breaks == "backward")
        graphs = MicroBatchGraphs(training, world, lambda: captures) if graphed else None
        store = random_store(rows=ROWS, seq_len=SEQ_LEN)
        optimizer = make_optimizer(training, config.train)
        trainer = Trainer(training, optimizer, store, config.train, 1, world, graphs)
        steps = list(trainer.steps(first_step=0, num_steps=NUM_STEPS))
        weights = {name: full(param) for name, param in trainable_parameters(training).items()}
    return {
        "losses": [metrics.loss for metrics in steps],
        "norms": [metrics.grad_norm for metrics in steps],
        "weights": weights,
        "counts": (captures.count, captures.replays),
        "asked": asked[0],
        "off": trainer.graphs_off,
    }


def run(
    base: Path, kind: str, *, graphed: bool, failing: int = -1, breaks: str | None = None
) -> list[dict[str, Any]]:
    arguments = (base, KINDS[kind], graphed, failing, breaks)
    return run_distributed(trained, *arguments, world_size=PROCESSES)


@cache
def run_plain(base: Path, kind: str) -> list[dict[str, Any]]:
    """Train without graphs; one run for all tests that compare with it."""
    return run(base, kind, graphed=False)


@pytest.mark.parametrize("kind", KINDS)
def test_processes_replay_the_run_that_they_make_without_graphs(base: Path, kind: str) -> None:
    """Their rows have other documents and other numbers of trained tokens, and layouts suit all."""
    plain, replayed = run_plain(base, kind), run(base, kind, graphed=True)
    counts = [result["counts"] for result in replayed]
    assert counts[0] == counts[1]
    assert counts[0][1] > STEPS
    for one, other in zip(plain, replayed, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
        assert one["norms"] == pytest.approx(other["norms"], rel=1e-4)
        torch.testing.assert_close(one["weights"], other["weights"], rtol=1e-3, atol=1e-5)


def test_within_a_graph_no_process_asks_the_others(base: Path) -> None:
    """They would wait for one that cannot capture and has gone on."""
    plain, replayed = run_plain(base, "sharded"), run(base, "sharded", graphed=True)
    assert plain[0]["asked"] > 0 == replayed[0]["asked"]


def test_one_process_that_cannot_capture_ends_the_graphs_of_all(base: Path) -> None:
    failed = run(base, "sharded", graphed=True, failing=1)
    assert [result["off"] for result in failed] == [
        "operation not permitted when stream is capturing"
    ] * PROCESSES
    assert all(result["counts"] == (1, 0) for result in failed)
    plain = run_plain(base, "sharded")
    assert plain[0]["losses"] == pytest.approx(failed[0]["losses"], rel=1e-5)


@pytest.mark.parametrize("kind", ["sharded", "weights kept to backward", "embedding on the host"])
@pytest.mark.parametrize("breaks", ["forward", "backward"])
def test_capture_that_breaks_off_within_the_layers_is_forgotten(
    base: Path, kind: str, breaks: str
) -> None:
    """Some layers are gathered then, and others' gradients under way."""
    plain, broken = run_plain(base, kind), run(base, kind, graphed=True, breaks=breaks)
    assert all(result["counts"] == (1, 0) and result["off"] for result in broken)
    assert plain[0]["losses"] == pytest.approx(broken[0]["losses"], rel=1e-5)
    torch.testing.assert_close(plain[0]["weights"], broken[0]["weights"], rtol=1e-3, atol=1e-5)


def zeroed(base: Path) -> tuple[bool, bool]:
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        numerics = Numerics(torch.float32, "sdpa")
        build = build_training_model(base, settings(), make_plan(), world, numerics=numerics)
        params = trainable_parameters(build.training)
        for param in params.values():
            param.grad = torch.ones_like(param)
        before = {name: local(param.grad).data_ptr() for name, param in params.items()}
        make_optimizer(build.training, settings().train).zero_grad(set_to_none=False)
        after = {name: local(param.grad) for name, param in params.items()}
    return (
        all(after[name].data_ptr() == place for name, place in before.items()),
        any(bool(grad.any()) for grad in after.values()),
    )


def test_shards_of_gradients_are_set_to_zero_where_they_are(base: Path) -> None:
    assert run_distributed(zeroed, base, world_size=PROCESSES) == [(True, False)] * PROCESSES
