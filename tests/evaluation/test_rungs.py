import pytest

from workflow.lib.evaluation.rungs import decide
from workflow.lib.system.errors import UserError

DRAWS = {"resamples": 200, "seed": 0}
EASY_AND_HARD = [1.0 + n for n in range(20)]  # documents differ far more than the runs


def documents(losses):
    return {n: (10 * loss, 10) for n, loss in enumerate(losses)}


def decided(runs, *, keep=1.0):
    found = decide({name: documents(own) for name, own in runs.items()}, keep=keep, **DRAWS)
    return {each.run: each.reason for each in found}


def test_run_that_is_worse_on_every_document_ends_however_much_documents_differ():
    worse = [loss + 0.01 for loss in EASY_AND_HARD]
    found = decided({"worse": worse, "best": EASY_AND_HARD})
    assert found == {"best": "lowest loss", "worse": "surely worse"}


def test_run_that_is_worse_on_some_documents_and_better_on_others_goes_on():
    mixed = [loss + (0.5 if n % 2 else -0.49) for n, loss in enumerate(EASY_AND_HARD)]
    assert decided({"best": EASY_AND_HARD, "mixed": mixed})["mixed"] == "not surely worse"


def test_equal_runs_all_go_on_and_the_first_is_the_best():
    equal = dict.fromkeys(("c", "a", "b"), EASY_AND_HARD)
    assert list(decided(equal).items()) == [
        ("c", "lowest loss"),
        ("a", "not surely worse"),
        ("b", "not surely worse"),
    ]


@pytest.mark.parametrize(
    ("keep", "count", "left"), [(0.5, 3, 2), (0.5, 4, 2), (0.1, 30, 3), (0.01, 5, 1), (1.0, 5, 5)]
)
def test_at_most_the_share_goes_on_rounded_up_and_never_none(keep, count, left):
    reasons = decided({f"r{n}": EASY_AND_HARD for n in range(count)}, keep=keep)
    assert [*reasons.values()].count("beyond keep") == count - left


def test_run_alone_goes_on_and_a_single_document_ends_none():
    assert decided({"one": EASY_AND_HARD}, keep=0.5) == {"one": "lowest loss"}
    assert decided({"best": [1.0], "other": [9.0]})["other"] == "not surely worse"


def test_runs_of_different_documents_are_refused():
    runs = {"a": documents([1.0, 2.0]), "b": documents([1.0])}
    with pytest.raises(UserError, match=r"runs a and b .* different held-out documents"):
        decide(runs, keep=1.0, **DRAWS)
