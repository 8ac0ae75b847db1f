"""Several processes capture and replay the same micro-batches; on a CPU a capture is the function
itself."""

from functools import cache
from unittest.mock import patch

import pytest
import torch

from tests.support.built_models import built_model
from tests.support.captures import BreaksOff, Captures
from tests.support.distributed import run_in_group
from tests.support.gathering import all_full
from tests.support.plans import make_plan
from tests.support.training_loops import CLIP, STEPS, restart_, settings, trainer, values_of
from workflow.lib.distributed import vocabulary_parallel
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.nf4_model import local
from workflow.lib.training.loop import make_optimizer
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs

PROCESSES = 2
KINDS = {
    "sharded": {},
    "weights kept to backward": {"reshard_after_forward": False},
    "embedding on the host": {"offload_embedding": True},
    "replicas": {"replicas": PROCESSES},
    "activations on the host": {"offload_activations": True, "offload_window_bytes": 4096},
}
BREAKS = ("breaks off in forward", "breaks off in backward")
# Kind -> with which captures it is trained.
WAYS = {
    "sharded": ("plain", "graphed", "one cannot capture", *BREAKS),
    "weights kept to backward": ("plain", "graphed", *BREAKS),
    "embedding on the host": ("plain", "graphed", *BREAKS),
    "replicas": ("plain", "graphed"),
    "activations on the host": ("plain", "graphed"),
}


def trained(training, world, config, way):
    """Train a model in one of `WAYS`; return what can be compared."""
    asked, ask = [0], vocabulary_parallel.largest_count

    def counted(count):
        asked[0] += 1
        return ask(count)

    captures = Captures(fails=way == "one cannot capture" and world.rank == 1)
    if way in BREAKS:
        layer = training.peft_model.get_base_model().model.layers[1]
        captures = BreaksOff(training, layer, backward=way == "breaks off in backward")
    graphs = None if way == "plain" else MicroBatchGraphs(training, world, lambda: captures)
    made = trainer(training, config, world, micro_batch_size=1, graphs=graphs)
    with patch.object(vocabulary_parallel, "largest_count", counted):
        steps = list(made.steps(first_step=0, num_steps=STEPS))
    return {
        "losses": [metrics.loss for metrics in steps],
        "norms": [metrics.grad_norm for metrics in steps],
        "weights": all_full(trainable_parameters(training)),
        "counts": (captures.count, captures.replays),
        "asked": asked[0],
        "off": made.graphs_off,
    }


def train_all(world, base, kind):
    config, plan = settings(max_grad_norm=CLIP), make_plan(processes=PROCESSES, **KINDS[kind])
    found = {}
    training = built_model(base, config, plan, world).training
    initial = values_of(training)
    for way in WAYS[kind]:
        restart_(training, initial)
        found[way] = trained(training, world, config, way)

    return found


@cache
def runs(base, kind):
    """Return what every process found, for each way; made once for all tests that look at it."""
    shards = PROCESSES // KINDS[kind].get("replicas", 1)
    results = run_in_group(train_all, base, kind, world_size=PROCESSES, shard_size=shards)
    return {way: [result[way] for result in results] for way in WAYS[kind]}


@pytest.mark.parametrize("kind", KINDS)
def test_processes_replay_the_run_that_they_make_without_graphs(base, kind):
    """Their rows have other documents and other numbers of trained tokens, and layouts suit all."""
    plain, replayed = (runs(base, kind)[way] for way in ("plain", "graphed"))
    counts = [result["counts"] for result in replayed]
    assert counts[0] == counts[1]
    assert counts[0][1] > 4
    for one, other in zip(plain, replayed, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
        assert one["norms"] == pytest.approx(other["norms"], rel=1e-4)
        torch.testing.assert_close(one["weights"], other["weights"], rtol=1e-3, atol=1e-5)


def test_within_a_graph_no_process_asks_the_others(base):
    """They would wait for one that cannot capture and has gone on."""
    plain, replayed = (runs(base, "sharded")[way] for way in ("plain", "graphed"))
    assert plain[0]["asked"] > 0 == replayed[0]["asked"]


def test_one_process_that_cannot_capture_ends_the_graphs_of_all(base):
    plain, failed = (runs(base, "sharded")[way] for way in ("plain", "one cannot capture"))
    assert [result["off"] for result in failed] == [
        "operation not permitted when stream is capturing"
    ] * PROCESSES
    assert all(result["counts"] == (1, 0) for result in failed)
    assert plain[0]["losses"] == pytest.approx(failed[0]["losses"], rel=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if BREAKS[0] in WAYS[kind]])
@pytest.mark.parametrize("breaks", BREAKS)
def test_capture_that_breaks_off_within_the_layers_is_forgotten(base, kind, breaks):
    """Some layers are gathered then, and others' gradients under way."""
    plain, broken = (runs(base, kind)[way] for way in ("plain", breaks))
    assert all(result["counts"] == (1, 0) and result["off"] for result in broken)
    assert plain[0]["losses"] == pytest.approx(broken[0]["losses"], rel=1e-5)
    torch.testing.assert_close(plain[0]["weights"], broken[0]["weights"], rtol=1e-3, atol=1e-5)


def zeroed(world, base):
    build = built_model(base, settings(), make_plan(), world)
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


def test_shards_of_gradients_are_set_to_zero_where_they_are(base):
    assert run_in_group(zeroed, base, world_size=PROCESSES) == [(True, False)] * PROCESSES
