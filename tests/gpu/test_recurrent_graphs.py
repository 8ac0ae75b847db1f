"""Micro-batches of models with recurrent layers as CUDA graphs, packed and not."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.support.distributed import run_in_group
from tests.support.families import RECURRENT, RECURRENT_EXPERTS, tiny_family
from tests.support.family_runs import family_store
from tests.support.models import adapted, quantized
from workflow.lib.model.documents import documents_of
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.training.batches import stored_batch
from workflow.lib.training.cuda_capture import CudaCapture
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs, forward_backward

pytestmark = pytest.mark.gpu
Run = Callable[[MicroBatch, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("rows", ["packed", "unpacked"])
@pytest.mark.parametrize("family", [*RECURRENT, *RECURRENT_EXPERTS])
def test_recurrent_layers_are_captured(tmp_path, one_gpu, family, rows):
    base = quantized(tiny_family(family, tmp_path / "original"), tmp_path / "nf4")
    (found,) = run_in_group(both_ways, base, rows, world_size=one_gpu, device="cuda")
    assert found["off"] is None
    assert found["replays"] >= 3
    for ours, theirs in zip(found["graphs"], found["plain"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2)


def both_ways(world, base, rows):
    """Return losses and gradient norms by graphs, and launched by Python."""
    replays = []
    training = adapted(base, attention="varlen", device="cuda", dtype=torch.bfloat16, r=4).train()
    graphs = MicroBatchGraphs(training, world, partial(counting, replays))
    found = {
        "plain": results(training, rows, partial(launched, training, world), world),
        "graphs": results(training, rows, graphs, world),
    }
    return {**found, "off": graphs.off, "replays": len(replays)}


def launched(training, world, batch, slope):
    return forward_backward(training, batch.to(world.device), slope)


def results(training, rows, run, world):
    store, slope = family_store(rows), torch.tensor(0.25, device=world.device)
    found = []
    for first in (0, 1, 2) * 3:
        batch = stored_batch(store, np.array([first, first + 1]))
        loss = run(
            replace(
                batch,
                documents=documents_of(batch.bounds[0].diff().tolist()),
                row_keys=torch.zeros(2, dtype=torch.int64),
            ),
            slope,
        )
        grads = [p.grad for p in trainable_parameters(training).values() if p.grad is not None]
        norm = torch.stack([grad.float().norm() for grad in grads]).norm()
        found.append((float(loss), float(norm)))
        training.zero_grad(set_to_none=False)
    return found


def counting(replays):
    capture = CudaCapture()

    def captured(function):
        replay = capture(function)

        def counted():
            replays.append(1)
            return replay()

        return counted

    return captured
