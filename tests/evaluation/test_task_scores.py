import json

import numpy as np
import pytest

from workflow.lib.artifacts.evaluation_record import Metric, Task
from workflow.lib.evaluation.task_scores import (
    TaskScores,
    difference_fields,
    loss_fields,
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
