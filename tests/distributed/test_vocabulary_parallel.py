"""Embedding and head in slices: the loss, its gradient, logits and rows are those of the whole
tables, and no table is gathered."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.gathering import all_full
from tests.support.models import adapted, base_fixture, random_store
from tests.support.plans import make_plan
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.distributed.vocabulary_parallel import (
    ExchangedRows,
    SlicedCrossEntropy,
    SlicedHead,
)
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.loss.chunked_loss import OutputHead
from workflow.lib.model.loss.vocabulary_slices import FEWEST_ROWS, chunk_rows, vocabulary_slices
from workflow.lib.model.nf4_model import local, local_range
from workflow.lib.settings.config import LoraSettings, RunConfig
from workflow.lib.training.batches import stored_batch
from workflow.lib.training.startup_checks import startup_checks

PROCESSES, HIDDEN, ROWS, SEQ_LEN = 4, 13, 8, 17
# a vocabulary that outgrows every other tensor of the tiny model; 4 slices of 1001, 1001, 1001, 998
LARGE = 4001
CONFIG = RunConfig(lora=LoraSettings(r=4))
# Vocabulary, softcap, scale, bias: slices of 53, 53, 53, 52 rows; and of 2, 2, 1, 0.
HEADS = {
    "plain": (211, None, 1.0, False),
    "capped": (211, 3.0, 1.0, False),
    "scaled, with a bias": (211, None, 0.25, True),
    "a process without a row of the head": (5, None, 1.0, True),
}
# Trained rows of each process: chunks are of 256 rows of each, so this takes two for all.
COUNTS = (3, 0, 257, 256)


def whole_head(case):
    vocab, softcap, scale, bias = HEADS[case]
    torch.manual_seed(0)
    module = nn.Linear(HIDDEN, vocab, bias=bias).requires_grad_(False)
    return OutputHead(module, scale, softcap)


def rows_of(rank, vocab):
    generator = torch.Generator().manual_seed(rank)
    hidden = 3 * torch.randn(COUNTS[rank], HIDDEN, generator=generator)
    return hidden, torch.randint(0, vocab, (COUNTS[rank],), generator=generator)


def cut(tensor, world):
    """Return a whole tensor in slices, as torch itself cuts it."""
    return nn.Parameter(distribute_tensor(tensor, world.mesh, [Shard(0)]), requires_grad=False)


def sliced(case, world):
    whole = whole_head(case)
    bias = None if whole.module.bias is None else cut(whole.module.bias, world)
    group = world.mesh.get_group()
    module = SlicedHead(cut(whole.module.weight, world), bias, group)
    head_loss = SlicedCrossEntropy(replace(whole, module=module), group)
    hidden, targets = rows_of(world.rank, len(whole.module.weight))
    hidden.requires_grad_()
    loss = head_loss(hidden, targets)
    (7 * loss).backward()
    with torch.no_grad():
        silent = head_loss(hidden, targets)
    embedding = nn.Embedding(*whole.module.weight.shape)
    embedding.weight = module.weight
    ids = rows_of(2, len(whole.module.weight))[1].roll(world.rank)
    return {
        "slopes": of_slopes(head_loss, hidden, targets),
        "loss": loss.detach(),
        "gradient": hidden.grad,
        "without gradients": (silent.requires_grad, silent),
        "logits": head_loss.head.logits(hidden[:, None].detach())[:, 0],
        "ids": ids,
        "rows": ExchangedRows(embedding, group, torch.float32)(ids),
    }


def of_slopes(head_loss, hidden, targets):
    """Gradients where each row has a slope: known before, and of its log-probability; of a frozen
    head and of a trained one."""
    results = {}
    masters = dict(head_loss.head.module.named_parameters())
    for trained in (False, True):
        for known in (True, False):
            for master in masters.values():
                master.requires_grad_(trained)
                master.grad = None
            leaf = hidden.detach().clone().requires_grad_()
            weights = weights_of(targets)
            if known:
                head_loss.summed_loss(leaf, targets, weights).backward()
            else:
                (weights * head_loss.log_probs(leaf, targets).square()).sum().backward()
            of_head = {name: p.grad.full_tensor() for name, p in masters.items() if trained}
            results[f"{trained} {known}"] = (leaf.grad, of_head)
    for master in masters.values():
        master.requires_grad_(False)
    return results


def weights_of(targets):
    return 0.25 * (targets % 7)


class LargestTensor(TorchDispatchMode):
    """Notes how many elements the largest tensor has that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if type(leaf) is torch.Tensor]
        self.largest = max(self.largest, *sizes, 0)
        return made


def engine(base, world, *, offload_embedding):
    """Loss and gradients of this process's rows of eight, of which two processes train none, by the
    model of a run."""
    plan = make_plan(offload_embedding=offload_embedding)
    model = built_model(base, CONFIG, plan, world)
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    checks = startup_checks(model, store, Checkpoint(base), world)
    model.training.train()
    params = trainable_parameters(model.training)
    fill_(params)
    mine = slice(2 * world.rank, 2 * world.rank + 2)
    mode = LargestTensor()
    with mode:
        loss = model.training(batch_of(mine, trained=world.rank % 2 == 0))
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {
        "checks": [check.passed for check in checks],
        "counted": model.num_parameters(),
        "loss": total,
        "gradients": all_full({name: p.grad for name, p in params.items()}),
        "largest": mode.largest,
    }


def fill_(params):
    """Give adapters values that do not depend on how they are sharded."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in params.values():
            start, stop = local_range(param)
            local(param).copy_((0.1 * torch.randn(param.shape, generator=generator))[start:stop])


def batch_of(rows, *, trained, device="cpu"):
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    store.loss_mask &= trained
    return stored_batch(store, rows).to(torch.device(device))


def survey(world, base):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    return {
        "heads": {case: sliced(case, world) for case in HEADS},
        "on the device": engine(base, world, offload_embedding=False),
        "on the host": engine(base, world, offload_embedding=True),
        "two replicas": engine(base, replace(world, mesh=mesh), offload_embedding=False),
    }


base = base_fixture(vocab_size=LARGE, num_hidden_layers=2)


@pytest.fixture(scope="module")
def found(base):
    return run_in_group(survey, base, world_size=PROCESSES)


@pytest.fixture(params=HEADS)
def case(request):
    return str(request.param)


def test_each_process_has_loss_and_gradient_of_its_own_rows(found, case):
    """Against one process with the whole head, in fp64. One process has no row, one has one more
    than a chunk."""
    head = whole_head(case)
    assert max(COUNTS) > chunk_rows(PROCESSES, vocab_size=len(head.module.weight))
    for rank, report in enumerate(found):
        result = report["heads"][case]
        hidden, targets = (x.clone() for x in rows_of(rank, len(head.module.weight)))
        hidden = hidden.double().requires_grad_()
        exact = replace(head, module=whole_head(case).module.double())
        logits = exact_logits(exact, hidden)
        expected = 7 * nn.functional.cross_entropy(logits, targets, reduction="sum")
        expected.backward()
        torch.testing.assert_close(7 * result["loss"].double(), expected, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(
            result["gradient"], hidden.grad, rtol=1e-4, atol=1e-5, check_dtype=False
        )


@pytest.mark.parametrize("known", [True, False], ids=["known before", "of log-probabilities"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_rows_have_slopes_of_their_own(found, case, trained, known):
    exact = replace(whole_head(case), module=whole_head(case).module.double().requires_grad_())
    leaves = []
    for rank in range(PROCESSES):
        hidden, targets = rows_of(rank, len(exact.module.weight))
        leaves.append(hidden.double().requires_grad_())
        logits = exact_logits(exact, leaves[-1])
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        (weights_of(targets) * (losses if known else losses.square())).sum().backward()
    expected = {name: p.grad for name, p in exact.module.named_parameters() if trained}
    for leaf, report in zip(leaves, found, strict=True):
        gradient, of_head = report["heads"][case]["slopes"][f"{trained} {known}"]
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-4, atol=1e-4, check_dtype=False)
        torch.testing.assert_close(of_head, expected, rtol=1e-4, atol=1e-3, check_dtype=False)


def exact_logits(head, hidden):
    logits = head.scale * head.module(hidden)
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def test_logits_of_all_slices_are_those_of_the_whole_head(found, case):
    head = whole_head(case)
    for rank, report in enumerate(found):
        hidden, _ = rows_of(rank, len(head.module.weight))
        torch.testing.assert_close(report["heads"][case]["logits"], head.logits(hidden))


def test_rows_of_a_sliced_embedding_are_the_tables_bit_for_bit(found, case):
    table = whole_head(case).module.weight
    for report in found:
        result = report["heads"][case]
        assert torch.equal(result["rows"], table[result["ids"]])


@pytest.fixture(params=["on the device", "on the host", "two replicas"])
def kind(request):
    return str(request.param)


@pytest.fixture(scope="module")
def expected(base):
    """The same by one process with whole tables, a row pair at a time."""
    training = adapted(base, r=4).train()
    params = trainable_parameters(training)
    fill_(params)
    total = torch.zeros(())
    for rank in range(0, PROCESSES, 2):
        loss = training(batch_of(slice(2 * rank, 2 * rank + 2), trained=True))
        loss.backward()
        total += loss.detach()
    gradients = {name: p.grad for name, p in params.items()}
    return {
        "loss": total,
        "gradients": gradients,
        "counted": sum(p.numel() for p in params.values()),
    }


def test_run_with_a_shared_vocabulary_is_that_of_one_process(found, expected, kind):
    """Though every second process trains no token of its rows."""
    for report in found:
        torch.testing.assert_close(report[kind]["loss"], expected["loss"], rtol=1e-5, atol=0)
        for name, gradient in expected["gradients"].items():
            largest = float(gradient.abs().max())
            torch.testing.assert_close(
                report[kind]["gradients"][name], gradient, rtol=1e-3, atol=1e-5 * largest
            )
            assert largest > 0


def test_no_tensor_of_a_step_is_larger_than_a_slice(found, kind):
    """Neither embedding nor head is ever gathered: forward and backward make no tensor of their
    size."""
    slices = vocabulary_slices(2 if kind == "two replicas" else PROCESSES)
    for report in found:
        assert report[kind]["largest"] <= -(-LARGE // slices) * 80


def test_start_up_checks_hold_and_count_all_parameters(found, kind):
    for report in found:
        assert report[kind]["checks"] == [True] * 6
        assert report[kind]["counted"] == report["on the device"]["counted"]


@pytest.mark.parametrize(
    ("shards", "slices"),
    [(1, 1), (2, 2), (7, 7), (8, 8), (11, 11), (16, 8), (18, 9), (26, 13), (512, 8)],
)
def test_more_than_8_processes_share_the_vocabulary_in_groups(shards, slices):
    assert vocabulary_slices(shards) == slices


@pytest.mark.parametrize("slices", [1, 2, 3, 8, 13])
def test_chunk_of_all_processes_has_about_as_many_rows_as_that_of_one(slices):
    for vocab_size in (32_000, 300_000):
        alone = chunk_rows(1, vocab_size=math.ceil(vocab_size / slices))
        together = slices * chunk_rows(slices, vocab_size=vocab_size)
        assert alone - slices < together < max(alone, slices * FEWEST_ROWS) + 1


@pytest.mark.parametrize(
    ("vocab_size", "rows"),
    [
        *((1000, 1024), (65_536, 1024), (128_256, 512), (262_144, 256)),
        *((262_208, 256), (262_209, 128), (2**24, 128)),  # the first is Gemma 3's
    ],
)
def test_logits_of_a_chunk_are_bounded_whatever_the_vocabulary(vocab_size, rows):
    assert chunk_rows(1, vocab_size=vocab_size) == rows
