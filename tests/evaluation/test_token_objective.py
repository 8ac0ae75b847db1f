"""The evaluation's held-out number is the one that training measures, for tokens with weights and
for a teacher's student."""

from contextlib import nullcontext

import pytest
import torch

from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.models import stock_base
from tests.support.plans import make_plan
from tests.support.scored_rows import scored_rows
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.evaluation.heldout_loss import heldout_sums
from workflow.lib.evaluation.questions import Archive, Questions, Subject, measure, parts
from workflow.lib.evaluation.results import evaluations
from workflow.lib.evaluation.token_objective import TokenObjective
from workflow.lib.objectives.objective import NEXT_TOKEN, Distill
from workflow.lib.scores.streamed_model import StreamedModel
from workflow.lib.settings.config import EvaluateConfig, LoraSettings, RunConfig
from workflow.lib.training.best_adapter import HeldOut

CPU = torch.device("cpu")
SETTINGS = EvaluateConfig(tasks=(), samples=0)
# Objective, and whether tokens have weights.
CASES = {
    "weights": (NEXT_TOKEN, True),
    "teacher": (Distill(temperature=1.5, sft_weight=0.6), False),
    "teacher and weights": (Distill(temperature=1.0, sft_weight=0.0), True),
}


def store_of(*, weights):
    return scored_rows("texts", top_k=5, weights=weights)


def questions_on(store, objective):
    numbers = [*range(len(store.heldout_documents()))]
    return Questions(
        settings=SETTINGS,
        tokenizer=None,
        documents=store.heldout_documents(),
        losses_of=numbers,
        sources=[("letters", "notes")[number % 2] for number in numbers],
        prompts=[],
        tasks={},
        objective=TokenObjective.of(store, objective),
    )


def evaluated(base, questions, folder):
    """Return the evaluation of a base, by an archive in `folder`, and the parts measured anew."""
    subject = Subject("base", "key", lambda: nullcontext(stock_base(base)))
    measured, new = measure(subject, parts(questions), archive=Archive(folder), machine={})
    found = evaluations({"base": measured}, questions, run="a", served="base")["base"]
    return found, new


def measured_by_training(world, base):
    """Return the losses of a fresh adapter, which changes nothing."""
    model = built_model(
        base, RunConfig(lora=LoraSettings(r=3)), make_plan(processes=world.size), world
    )
    losses = {}
    for case, (objective, weights) in CASES.items():
        store, model.training.objective = store_of(weights=weights), objective
        heldout = HeldOut(store, every=1, num_steps=1, at_most=None, seed=0, micro_batch_size=2)
        losses[case] = heldout.losses(model.training, world=world).whole
    return losses


@pytest.fixture(scope="module")
def trained(base):
    (losses,) = run_in_group(measured_by_training, base, world_size=1)
    return losses


@pytest.mark.parametrize("case", CASES)
def test_number_is_that_of_training(base, trained, tmp_path, case):
    objective, weights = CASES[case]
    found, _ = evaluated(base, questions_on(store_of(weights=weights), objective), tmp_path)
    plain, _ = evaluated(base, questions_on(store_of(weights=False), NEXT_TOKEN), tmp_path)
    number = found.heldout if found.objective is None else found.objective
    assert number.loss == pytest.approx(trained[case], rel=1e-5)  # fp32 sums in another order
    assert number.loss != pytest.approx(plain.heldout.loss, rel=1e-3)
    assert found.heldout.perplexity == plain.heldout.perplexity
    assert (found.objective is None) == (objective is NEXT_TOKEN)


def test_weights_count_in_every_source_and_document(base, tmp_path):
    store = store_of(weights=True)
    found, _ = evaluated(base, questions_on(store, NEXT_TOKEN), tmp_path)
    documents = found.heldout.per_document
    assert [x.weight for x in documents] == [
        float(store.heldout_weights(x.document).sum()) for x in documents
    ]
    for name, source in found.heldout.sources.items():
        own = [x for x in documents if x.source == name]
        expected = sum(x.weighted_sum for x in own) / sum(x.weight for x in own)
        assert source.loss == pytest.approx(expected)


def test_without_weights_and_teacher_a_record_has_no_field_of_them(base, tmp_path):
    found, _ = evaluated(base, questions_on(store_of(weights=False), NEXT_TOKEN), tmp_path)
    assert "objective" not in found.as_json()
    assert {*found.as_json()["heldout"]["per_document"][0]} == {
        "document", "source", "loss_sum", "tokens"
    }  # fmt: skip


OTHER_WEIGHTS = store_of(weights=True)
OTHER_WEIGHTS._heldout_weights = 3 * OTHER_WEIGHTS._heldout_weights


@pytest.mark.parametrize(
    ("store", "objective"),
    [
        (OTHER_WEIGHTS, NEXT_TOKEN),
        (store_of(weights=False), NEXT_TOKEN),
        (store_of(weights=True), Distill(temperature=1.0, sft_weight=0.0)),
    ],
)
def test_archived_part_is_of_the_same_weights_and_objective(base, tmp_path, store, objective):
    weighted = questions_on(store_of(weights=True), NEXT_TOKEN)
    assert evaluated(base, weighted, tmp_path)[1] == ["heldout"]
    assert evaluated(base, weighted, tmp_path)[1] == []
    assert evaluated(base, questions_on(store, objective), tmp_path)[1] == ["heldout"]


@pytest.mark.parametrize("case", CASES)
def test_model_read_layer_by_layer_has_the_number_of_a_loaded_one(base, case):
    objective, weights = CASES[case]
    questions = questions_on(store_of(weights=weights), objective)
    summed = questions.objective.summed(questions.losses_of)
    folder = base.with_name("original")
    loaded = heldout_sums(
        stock_base(folder), questions.documents, batch_size=4, device=CPU, objective=summed
    )
    streamed = StreamedModel(Checkpoint(folder), device=CPU, dtype=torch.float32)
    for one, other in zip(loaded, streamed.losses(questions.documents, summed), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_student_is_compared_with_the_base_as_the_original_may_be_its_teacher(base, tmp_path):
    objective, weights = CASES["teacher"]
    questions = questions_on(store_of(weights=weights), objective)
    measured, _ = measure(
        Subject("base", "key", lambda: nullcontext(stock_base(base))),
        parts(questions),
        archive=Archive(tmp_path),
        machine={},
    )
    found = evaluations(
        {"original": measured, "base": measured, "tuned": measured},
        questions,
        run="a",
        served="tuned",
    )
    assert found["tuned"].objective.against == "NF4 base"
    assert found["tuned"].objective.loss_difference == 0.0
