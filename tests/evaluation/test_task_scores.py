import json

import numpy as np
import pytest

from workflow.lib.artifacts.evaluation_record import Metric, Task
from workflow.lib.evaluation.task_scores import TaskScores, task_differences


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
    found = task_differences(base, tuned, resamples=100, seed=0)
    assert found["t"]["acc"].as_json() == {
        "difference": 0.5,
        "difference_ci95": (0.5, 0.5),
        "p_value": pytest.approx(2 / 101),
        "test": "paired bootstrap",
        "gained": None,
        "lost": None,
    }


def test_metric_that_is_no_mean_over_items_has_no_interval():
    found = task_differences(made([0.0], value=2.0), made([0.0], value=3.0), resamples=100, seed=0)
    paired = found["t"]["acc"].as_json()
    assert paired.pop("difference") == 1.0
    assert set(paired.values()) == {None}


def test_items_that_differ_between_base_and_tuned_are_a_defect():
    with pytest.raises(AssertionError, match="did not answer the same items"):
        task_differences(made([0.0, 1.0]), made([0.0, 1.0, 1.0]), resamples=100, seed=0)


def test_right_and_wrong_answers_are_compared_by_the_exact_mcnemar_test():
    base, tuned = made([0.0] * 9 + [1.0] * 5), made([1.0] * 7 + [0.0] * 3 + [1.0] * 4)
    found = task_differences(base, tuned, resamples=100, seed=0)["t"]["acc"]
    assert (found.test, found.gained, found.lost) == ("exact McNemar", 7, 1)
    assert found.p_value == pytest.approx(2 * (1 + 8) / 2**8)
    assert found.difference == pytest.approx(6 / 14)


def test_scores_survive_the_archive():
    scores = made([0.0, 1.0, 0.25])
    assert TaskScores.from_json(json.loads(json.dumps(scores.to_json()))) == scores
