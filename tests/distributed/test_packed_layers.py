"""Decoder layers whose packed weights are gathered for their use alone, from slices on the device
and in host memory: the same numbers, and less on the device."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_vocabulary_parallel import batch_of, fill_
from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.gathering import all_full
from tests.support.models import base_fixture, random_store
from tests.support.plans import make_plan
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.model.architecture.layer_choice import activation_offload_layers, spread
from workflow.lib.model.layers.frozen_linear import frozen_linears
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.config import LoraSettings, RunConfig
from workflow.lib.system.errors import UserError
from workflow.lib.training.micro_batch_graphs import forward_backward
from workflow.lib.training.startup_checks import startup_checks

LAYERS = 3
# Recomputation, and how many layers are on the host with it.
CASES = {False: (0, 2), True: (0, 1, 2), 3: (0, LAYERS)}
WHOLE = "whole"  # instead of a count: none is on the host, and layers stay gathered after forward
CORRUPTED = (0, 1)  # counts with recomputation, of which a byte is changed at the end
CHANGED = [(level, count) for level, counts in CASES.items() for count in counts if count]


base = base_fixture(num_hidden_layers=LAYERS, keep=("down_proj", r"layers\.1"))


def engine(base, world, *, count, level):
    """Two micro-batches of this process by a model with `count` layers on the host: losses,
    gradients, what was there."""
    plan = make_plan(
        offload_layers=0 if count == WHOLE else count,
        activation_checkpointing=level,
        reshard_after_forward=count != WHOLE,
    )
    config = RunConfig(lora=LoraSettings(r=3, alpha=6))
    model = built_model(base, config, plan, world)
    store = random_store(rows=7, seq_len=23)
    checks = startup_checks(model, store, Checkpoint(base), world)
    params = trainable_parameters(model.training)
    fill_(params)
    model.training.train()
    there = watched(model)
    losses = []
    for number in (0, 1):
        row = 2 * world.rank + number
        batch = batch_of(slice(row, row + 1), trained=True)
        losses.append(float(forward_backward(model.training, batch, torch.ones(()))))
    packed_layers, damaged = model.packed_layers, level is True and count in CORRUPTED
    sizes = [packed_layers.host_bytes if packed_layers else 0, model.bytes_read]
    summed = torch.tensor(sizes)
    dist.all_reduce(summed)
    return {
        "checks": [check.passed for check in checks],
        "losses": losses,
        "gradients": all_full({name: p.grad for name, p in params.items()}),
        "most there": max(there),
        "left": sum(map(packed, waiting_layers(model))),
        "host_bytes": summed[0].item(),
        "bytes_read": summed[1].item(),
        "corrupted": corrupted(model, store, base, world) if packed_layers and damaged else "",
    }


def packed(layer):
    return all(
        type(linear.weight.data) is torch.Tensor and linear.weight.numel() > 0
        for _, linear in frozen_linears(layer)
    )


def layers_of(model):
    return model.training.peft_model.get_base_model().get_decoder().layers


def waiting_layers(model):
    """Return the decoder layers whose packed weights are gathered."""
    numbers = model.packed_layers.slices if model.packed_layers else {}
    return [layers_of(model)[number] for number in numbers]


def watched(model):
    """Note whenever a layer computes, forward or again, how many of those that are gathered have
    their weights there."""
    waiting = waiting_layers(model)
    assert not any(map(packed, waiting)), "the checks leave slices alone"
    there = [0]
    for layer in layers_of(model):
        layer.mlp.register_forward_pre_hook(lambda *_: there.append(sum(map(packed, waiting))))
    return there


def corrupted(model, store, base, world):
    """Change one byte of this process's slices; return what the checks say."""
    for mine in model.packed_layers.slices.values():
        mine[:1] += 1
    try:
        startup_checks(model, store, Checkpoint(base), world)
    except UserError as error:
        return str(error)
    return ""


def survey(world, base):
    cases = [(count, level) for level, counts in CASES.items() for count in (*counts, WHOLE)]
    return {(c, level): engine(base, world, count=c, level=level) for c, level in cases}


@pytest.fixture(scope="module", params=[1, 3], ids=lambda n: f"{n} processes")
def found(request, base):
    return run_in_group(survey, base, world_size=request.param)


@pytest.mark.parametrize(
    ("level", "count"), [*CHANGED, *((level, WHOLE) for level in CASES)], ids=str
)
def test_layers_on_the_host_or_gathered_to_stay_change_no_loss_and_no_gradient(found, level, count):
    for result in found:
        one, other = result[count, level], result[0, level]
        assert one["losses"] == other["losses"]
        torch.testing.assert_close(one["gradients"], other["gradients"], rtol=0, atol=0)


def test_every_check_passes_with_layers_on_the_host(found):
    assert all(all(case["checks"]) for result in found for case in result.values())


@pytest.mark.parametrize("count", CORRUPTED)
def test_changed_byte_of_a_slice_is_found_before_the_first_step(found, count):
    for result in found:
        changed = count or len(found) > 1  # one process gathers what is on the host alone
        message = result[count, True]["corrupted"]
        assert ("tensors differ from the checkpoint" in message) == bool(changed)


def test_at_most_the_layer_in_use_has_its_weights(found):
    """The next one's are on their way, in a buffer that no parameter points at."""
    for result in found:
        most = {key: case["most there"] for key, case in result.items()}
        there = {most[key] for key in most if key[0] != WHOLE and (key[0] or len(found) > 1)}
        assert there == {1}
        stay = {most[key] for key in most if key[0] == WHOLE}
        assert stay == {LAYERS if len(found) > 1 else 0}


def test_no_layer_has_its_weights_after_a_micro_batch(found):
    assert all(case["left"] == 0 for result in found for case in result.values())


def test_every_byte_is_read_once_and_kept_by_one_process(found):
    """A layer's host bytes are those of its weights, but for parts and slices rounded to 512 bytes:
    of the second layer and of `down_proj` in the compute dtype, of the others in NF4."""
    result = found[0]
    assert len({case["bytes_read"] for case in result.values()}) == 1
    down, others = 80 * 176, 2 * 80 * 80 + 2 * 16 * 80 + 2 * 176 * 80
    rounding = 14 * 512 + 28 * 4 + 3 * 512
    for count, stored in ((1, 4 * (down + others)), (2, 2 * (4 * down + others * (0.5 + 1 / 64)))):
        assert 0 <= result[count, True]["host_bytes"] - stored < count * rounding


def test_offloaded_layers_are_spread_evenly():
    assert spread(2, 8) == [2, 6]
    assert spread(3, 7) == [1, 3, 5]
    assert spread(8, 8) == [*range(8)]
    assert spread(0, 8) == []
    assert activation_offload_layers(3, recomputation=False, num_layers=8) == [0, 2, 5]
    assert activation_offload_layers(2, recomputation=4, num_layers=8) == [1, 5]
    assert activation_offload_layers(7, recomputation=4, num_layers=8) == [0, 1, 2, 3, 5, 6, 7]
    assert activation_offload_layers(True, recomputation=True, num_layers=3) == [0, 1, 2]
    for total in range(1, 90):
        for count in range(1, total + 1):
            chosen = spread(count, total)
            assert len(set(chosen)) == count
            assert max(chosen) < total
            gaps = {b - a for a, b in itertools.pairwise(chosen)}
            assert 2 * count > total or not gaps & {1}
