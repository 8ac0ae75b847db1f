"""Objectives against dense references: one whose slopes are known before (weights of tokens), and
one whose slopes follow from the sums over documents (pairs), for frozen and trained heads, any
number of processes and any accumulation."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.support.built_models import built_model
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.gathering import all_full
from tests.support.models import VOCAB, quantized, tiny_llama
from tests.support.plans import make_plan
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.world import process_group
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.objectives.next_token import NEXT_TOKEN
from workflow.lib.objectives.objective import Head, Objective, TokensOfBatch, document_sums
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.training.batches import stored_batch
from workflow.lib.training.loop import Trainer, make_optimizer

ROWS, SEQ_LEN, BETA = 6, 19, 0.5
TRAIN = TrainConfig(epochs=None, max_steps=1, global_batch_size=ROWS, max_grad_norm=None)
HEADS: dict[str, tuple[str, ...]] = {"frozen head": (), "trained head": ("lm_head",)}


class Pairs:
    """Prefers the first document of each row to the second (DPO, arXiv 2305.18290, eq. 7, with a
    reference that gives all answers the same probability)."""

    def loss(self, head: Head, states: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
        return preference_loss(document_sums(head.log_probs(states, batch.targets), batch))

    def size(self, batch: TokensOfBatch) -> int:
        return len(batch.bounds[0]) // 2

    def sizes(self, rows: Any) -> npt.NDArray[Any]:
        return np.ones(rows.num_rows)


def preference_loss(sums):
    chosen, rejected = sums.view(-1, 2).T
    return -logsigmoid(BETA * (chosen - rejected)).sum()


OBJECTIVES: dict[str, Objective] = {"weights": NEXT_TOKEN, "pairs": Pairs()}


def two_documents_a_row(*, weights=(0.25, 1, 2)):
    """weights: those of trained tokens are drawn from these, or all are this one."""
    draw = np.random.default_rng(0)
    positions = np.empty((ROWS, SEQ_LEN), dtype=np.int32)
    for row, cut in zip(positions, draw.integers(5, SEQ_LEN - 5, size=ROWS), strict=True):
        row[:cut], row[cut:] = np.arange(cut), np.arange(SEQ_LEN - cut)
    mask = (draw.random((ROWS, SEQ_LEN)) < 0.6) & (positions > 0)
    arrays = {
        "train.input_ids.npy": draw.integers(0, VOCAB, (ROWS, SEQ_LEN), dtype=np.uint32),
        "train.loss_mask.npy": mask,
        "train.position_ids.npy": positions,
        "heldout.input_ids.npy": np.zeros(1),
        "heldout.loss_mask.npy": np.zeros(1),
        "heldout.offsets.npy": np.array([0, 1]),
    }
    if weights is not None:
        drawn = draw.choice(np.atleast_1d(weights), mask.shape).astype(np.float32)
        arrays["train.weights.npy"] = mask * drawn
    return TokenStore(manifest={}, arrays=arrays)


def dense(model, name):
    store, params = two_documents_a_row(), trainable_parameters(model.training)
    batch = stored_batch(store, np.arange(ROWS))
    logits = model.training.family_logits(batch.input_ids, batch.position_ids)
    log_probs = logits.log_softmax(dim=1)[batch.positions].gather(1, batch.targets[:, None])[:, 0]
    if name == "weights":
        weights = torch.from_numpy(store.weights[store.loss_mask])
        loss = -(weights * log_probs).sum() / weights.sum()
    else:
        edges = [*np.flatnonzero(store.position_ids.ravel() == 0), store.position_ids.size]
        sums = [
            log_probs[(batch.positions >= start) & (batch.positions < stop)].sum()
            for start, stop in itertools.pairwise(edges)
        ]
        loss = preference_loss(torch.stack(sums)) / ROWS
    loss.backward()
    return float(loss.detach()), {key: param.grad for key, param in params.items()}


def one_step(model, name, world, rows):
    training, gradients = model.training, {}
    training.objective = OBJECTIVES[name]
    params = trainable_parameters(training)
    optimizer = make_optimizer(training, TRAIN.model_copy(update={"learning_rate": 1e-9}))

    def keep(*_):
        gradients.update(all_full({key: param.grad for key, param in params.items()}))

    optimizer.register_step_pre_hook(keep)
    trainer = Trainer(training, optimizer, two_documents_a_row(), TRAIN, rows, world)
    (metrics,) = trainer.steps(first_step=0, num_steps=1)
    return metrics.loss, gradients


def build(base, head, world):
    lora = LoraSettings(r=4, modules_to_save=HEADS[head])
    model = built_model(base, RunConfig(lora=lora), make_plan(), world)
    for key, param in trainable_parameters(model.training).items():
        if ".lora_B." in key:  # else those of lora_A have no gradient
            torch.nn.init.constant_(param, 0.03)
    return model


def survey(base):
    found: dict[str, Any] = {}
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        share = ROWS // world.size
        for head, name in itertools.product(HEADS, OBJECTIVES):
            for rows in {share, 1}:
                model = build(base, head, world)
                found[f"{head}, {name}, {rows}"] = one_step(model, name, world, rows)
            if world.size == 1:
                found[f"{head}, {name}, dense"] = dense(build(base, head, world), name)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objectives")
    return quantized(tiny_llama(folder / "original", num_hidden_layers=2), folder / "nf4")


@pytest.fixture(scope="module")
def alone(base):
    (found,) = run_distributed(survey, base, world_size=1)
    return found


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda n: f"{n} processes")
def found(request, base, alone):
    if request.param == 1:
        return alone
    return run_distributed(survey, base, world_size=request.param)[-1]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("head", HEADS)
def test_step_has_the_loss_and_the_gradients_of_a_dense_reference(found, alone, head, name):
    loss, expected = alone[f"{head}, {name}, dense"]
    forms = [key for key in found if key.startswith(f"{head}, {name}, ") and "dense" not in key]
    assert len(forms) == 2
    for form in forms:
        assert found[form][0] == pytest.approx(loss, rel=1e-5)
        assert found[form][1].keys() == expected.keys()
        for key, gradient in expected.items():
            largest = float(gradient.abs().max())
            assert largest > 0
            torch.testing.assert_close(
                found[form][1][key], gradient, rtol=1e-3, atol=1e-4 * largest
            )


def test_weights_that_are_all_equal_change_nothing():
    """A gradient three times as large is divided by a sum of weights three times as large."""
    tripled, plain = two_documents_a_row(weights=3), two_documents_a_row(weights=None)
    assert (NEXT_TOKEN.sizes(tripled) == 3 * NEXT_TOKEN.sizes(plain)).all()
    weights = stored_batch(tripled, np.arange(2)).weights
    assert weights is not None
    assert weights.tolist() == [3.0] * NEXT_TOKEN.size(stored_batch(plain, np.arange(2)))
