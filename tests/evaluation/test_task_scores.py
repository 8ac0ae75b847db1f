"""Items of tasks that training rows repeat are found, wherever they stand in them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from workflow.lib.artifacts.evaluation_record import Metric, Task
from workflow.lib.evaluation.task_scores import (
    RUN,
    TaskScores,
    difference_fields,
    loss_fields,
    overlap_shares,
    task_differences,
)


def made(values, *, value=None):
    items = {(n, "document", "prompt"): v for n, v in enumerate(values)}
    mean = float(np.mean(values)) if value is None else value
    metrics = {"acc": Metric(value=mean, stderr=None, higher_is_better=None)}
    return TaskScores(
        scores={"t": Task(metrics=metrics, items=len(values), version=None)},
        items={("t", "acc"): items} if value is None else {},
    )


def test_difference_is_tuned_minus_base_with_an_interval_over_paired_items():
    base, tuned = made([0.0, 1.0] * 50), made([0.5, 1.5] * 50)
    found = task_differences(base, tuned)
    assert found["t"]["acc"].as_json() == {
        "difference": 0.5,
        "difference_ci95": (0.5, 0.5),
        "p_value": pytest.approx(2 / 10_000),
        "test": "sign flips",
        "gained": None,
        "lost": None,
    }


def test_metric_that_is_no_mean_over_items_has_no_interval():
    found = task_differences(made([0.0], value=2.0), made([0.0], value=3.0))
    paired = found["t"]["acc"].as_json()
    assert paired.pop("difference") == 1.0
    assert set(paired.values()) == {None}


def test_items_that_differ_between_base_and_tuned_are_a_defect():
    with pytest.raises(AssertionError, match="did not answer the same items"):
        task_differences(made([0.0, 1.0]), made([0.0, 1.0, 1.0]))


def test_right_and_wrong_answers_are_compared_by_the_exact_mcnemar_test():
    base, tuned = made([0.0] * 9 + [1.0] * 5), made([1.0] * 7 + [0.0] * 3 + [1.0] * 4)
    found = task_differences(base, tuned)["t"]["acc"]
    assert (found.test, found.gained, found.lost) == ("exact McNemar", 7, 1)
    assert found.p_value == pytest.approx(2 * (1 + 8) / 2**8)
    assert found.difference == pytest.approx(6 / 14)


def test_scores_survive_the_archive():
    scores = made([0.0, 1.0, 0.25])
    assert TaskScores.from_json(json.loads(json.dumps(scores.to_json()))) == scores


def test_loss_is_weighted_by_tokens():
    found = loss_fields([(6.0, 2), (1.0, 5)])
    assert (found["loss"], found["documents"], found["trained_tokens"]) == (1.0, 2, 7)
    assert found["loss_ci95"][0] < 1.0 < found["loss_ci95"][1]


@pytest.mark.parametrize(("documents", "has_interval"), [(0, False), (5, False), (6, True)])
def test_difference_of_few_documents_has_no_interval(documents, has_interval):
    pairs = [((3.0 + n, 2), (1.0 + n, 2)) for n in range(documents)]
    found = difference_fields(pairs)
    assert found["documents"] == documents
    assert found["loss_difference"] == (1.0 if documents else None)
    assert (found["loss_difference_ci95"] is not None) == has_interval


def tokenizer(text, *, add_special_tokens):
    assert not add_special_tokens
    return {"input_ids": [int(word) for word in text.split()]}


def shares(documents, rows):
    tasks = {"task": SimpleNamespace(eval_docs=documents)}
    return overlap_shares(tasks, np.array(rows, np.uint32), tokenizer)["task"]


def text(*numbers):
    return " ".join(map(str, numbers))


ROWS = [range(100, 140), range(200, 240)]


@pytest.mark.parametrize(
    ("document", "share"),
    [
        ({"text": text(*range(203, 203 + RUN))}, 1.0),
        ({"text": text(*range(203, 203 + RUN - 1), 7)}, 0.0),
        ({"text": text(*range(110, 110 + RUN), *range(900, 900 + RUN))}, 0.5),
        ({"text": text(*range(135, 140), *range(200, 206))}, 0.0),  # over the end of a row
        ({"question": text(*range(5)), "choices": [text(*range(100, 120)), text(1, 2)]}, 1.0),
        ({"question": text(*range(5)), "label": 3}, None),
        ({"question": text(*[0] * RUN)}, 0.0),
    ],
)
def test_share_is_that_of_the_tokens_in_runs_of_training_rows(document, share):
    assert shares([document], ROWS) == [share]


def test_rows_shorter_than_a_run_and_tasks_without_items_repeat_nothing():
    assert shares([{"text": text(*range(100, 140))}], [[100, 101, 102]]) == [0.0]
    assert shares([], ROWS) == []


def test_every_row_is_searched_however_many_are_hashed_at_a_time(monkeypatch):
    monkeypatch.setattr("workflow.lib.evaluation.task_scores.CHUNK_TOKENS", 1)
    documents = [{"text": text(*row)} for row in ROWS]
    assert shares(documents, ROWS) == [1.0, 1.0]


def test_wording_that_items_share_does_not_count():
    wording = text(*range(100, 120))
    documents = [{"text": f"{wording} {text(*range(900, 915))}"}, {"text": wording}]
    assert shares(documents, ROWS) == [0.0, 0.0]
