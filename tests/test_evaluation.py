import json
import math

import numpy as np
import pytest
import torch

from tests.test_harness import task_file
from tests.tiny_export import random_documents, tiny_adapter, tiny_base, tiny_tokens
from workflow.lib.artifacts import provenance
from workflow.lib.config import EvaluateConfig
from workflow.lib.errors import UserError
from workflow.lib.evaluation import artifact, compare, measure, prepare, summary_lines
from workflow.lib.heldout import heldout_losses
from workflow.lib.inference import load_adapter, load_base
from workflow.lib.records import Evaluation, TunedEvaluation
from workflow.lib.tokenizer import load_tokenizer
from workflow.lib.tokens import TokenStore

CPU = torch.device("cpu")
DOCUMENTS = random_documents(9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    tiny_adapter(tiny_base(folder / "base"), folder / "adapter")
    tiny_tokens(folder / "tokens", DOCUMENTS)
    tiny_tokens(folder / "one", DOCUMENTS[:1])
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    local = task_file(tmp_path_factory.mktemp("tasks"), "local")
    return local.model_copy(update={"samples": 3, "max_new_tokens": 5, "bootstrap_resamples": 200})


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder / "base")


def store(folder, name="tokens"):
    return TokenStore.open(folder / name)


def load(folder):
    return load_base(folder / "base", device=CPU, compute_dtype=torch.float32, attention="sdpa")


@pytest.fixture(scope="module")
def evaluated(folder, settings, tokenizer):
    """Questions, both measurements and both artifacts of one evaluation."""
    questions = prepare(store(folder), tokenizer=tokenizer, settings=settings)
    model = load_adapter(load(folder), folder / "adapter")
    with model.disable_adapter():
        before = measure(model, questions, subject="base")
    after = measure(model, questions, subject="tuned")
    base = artifact(before, questions, subject="base", run="demo")
    tuned = artifact(after, questions, subject="tuned", run="demo")
    tuned["comparison"] = compare(before, after, settings=settings)
    return questions, before, after, base, tuned


def test_base_with_the_adapter_off_measures_as_the_plain_base(folder, evaluated):
    plain = heldout_losses(load(folder), DOCUMENTS, batch_size=4, device=CPU)
    assert evaluated[1].losses == plain


def test_tuned_measures_otherwise_than_base(evaluated):
    _, before, after, _, _ = evaluated
    assert all(
        abs(b - t) > 1e-3 for (b, _), (t, _) in zip(before.losses, after.losses, strict=True)
    )
    assert before.answers != after.answers


def test_artifacts_are_what_the_report_reads(evaluated):
    *_, base, tuned = evaluated
    made_by = {"provenance": provenance()}
    Evaluation.model_validate_json(json.dumps(base | made_by, allow_nan=False))
    TunedEvaluation.model_validate_json(json.dumps(tuned | made_by, allow_nan=False))


def test_loss_is_the_sum_over_tokens_of_all_documents(evaluated):
    heldout = evaluated[3]["heldout"]
    loss_sum = sum(document["loss_sum"] for document in heldout["per_document"])
    tokens = sum(int(mask.sum()) for _, mask in DOCUMENTS)
    assert heldout["loss"] == pytest.approx(loss_sum / tokens)
    assert heldout["perplexity"] == pytest.approx(math.exp(loss_sum / tokens))
    assert (heldout["trained_tokens"], heldout["documents"]) == (tokens, 9)
    assert heldout["loss_ci95"][0] < heldout["loss"] < heldout["loss_ci95"][1]


def test_loss_difference_is_base_minus_tuned(evaluated):
    *_, base, tuned = evaluated
    comparison = tuned["comparison"]
    difference = base["heldout"]["loss"] - tuned["heldout"]["loss"]
    assert comparison["loss_difference"] == pytest.approx(difference)
    low, high = comparison["loss_difference_ci95"]
    assert low < difference < high


def test_task_difference_is_tuned_minus_base(evaluated):
    *_, base, tuned = evaluated
    before, after = (a["tasks"]["local"]["metrics"]["acc"]["value"] for a in (base, tuned))
    found = tuned["comparison"]["tasks"]["local"]["acc"]["difference"]
    assert found == pytest.approx(after - before)


def test_samples_are_the_same_prompts_for_both_and_the_documents_own_text(evaluated, tokenizer):
    *_, base, tuned = evaluated
    assert len(base["samples"]) == 3
    for before, after in zip(base["samples"], tuned["samples"], strict=True):
        assert {**before, "answer": ""} == {**after, "answer": ""}
        ids, mask = DOCUMENTS[before["document"]]
        assert before["prompt"] == tokenizer.decode(ids[: np.argmax(mask)].tolist())
        first = int(np.argmax(mask))
        end = first + int(np.argmin(np.append(mask[first:], False)))
        assert before["reference"] == tokenizer.decode(ids[first:end].tolist())


def test_summary_names_loss_and_task_with_signed_differences(evaluated):
    *_, base, tuned = evaluated
    loss, task = summary_lines(base, tuned)
    assert loss.startswith(f"held-out loss {base['heldout']['loss']:.4f} -> ")
    assert f"base - tuned {tuned['comparison']['loss_difference']:+.4f} (95% interval " in loss
    assert task.startswith("local acc 0.")


def test_what_is_switched_off_is_null_or_empty(folder, tokenizer):
    off = EvaluateConfig(heldout=False, tasks=(), samples=0)
    questions = prepare(store(folder), tokenizer=tokenizer, settings=off)
    nothing = measure(load(folder), questions, subject="base")
    written = artifact(nothing, questions, subject="base", run="demo")
    assert (written["heldout"], written["tasks"], written["samples"]) == (None, {}, [])
    assert compare(nothing, nothing, settings=off) == {
        "loss_difference": None,
        "loss_difference_ci95": None,
        "p_value": None,
        "documents": 0,
        "tasks": {},
    }


def test_max_documents_bounds_the_documents(folder, tokenizer):
    few = EvaluateConfig(tasks=(), max_documents=4)
    assert len(prepare(store(folder), tokenizer=tokenizer, settings=few).losses_of) == 4


def test_one_document_is_too_few_for_an_interval(folder, tokenizer):
    with pytest.raises(
        UserError, match=r"evaluate\.heldout = True: an interval needs at least 2 .* there are 1\."
    ):
        prepare(store(folder, "one"), tokenizer=tokenizer, settings=EvaluateConfig(tasks=()))


def test_broken_weights_are_named_as_such(folder, tokenizer):
    model = load_adapter(load(folder), folder / "adapter")
    for name, parameter in model.named_parameters():
        if "layers.1.mlp.down_proj.lora_B" in name:
            parameter.data.fill_(float("nan"))
    loss_only = EvaluateConfig(tasks=(), samples=0, bootstrap_resamples=100)
    questions = prepare(store(folder), tokenizer=tokenizer, settings=loss_only)
    measured = measure(model, questions, subject="tuned")
    with pytest.raises(
        UserError, match=r"held-out loss of the tuned model is nan.*lower train\.learning_rate"
    ):
        artifact(measured, questions, subject="tuned", run="demo")
