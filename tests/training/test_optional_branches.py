"""Every family with every branch of its config switched on: clips, caps, limits, biases, norms of
queries, LongRoPE beyond its limit train as the stock model, and what draws random numbers has the
same gradients with recomputation."""

import pytest

from tests.support.distributed import run_distributed
from tests.support.families import FAMILIES
from tests.support.optional_branches import DRAWN, branches, run_branches

OTHERS = ("olmo", "phimoe", "minimax_m2")
SWITCHED = {family: branches(family) for family in (*FAMILIES, *OTHERS)}
# Attention's dropout alone is one for all: `tests/training/test_build.py`.
NOISY = [
    family
    for family, found in SWITCHED.items()
    if any(DRAWN.search(name) for name in found if name != "attention_dropout")
]
PLAIN = [family for family, found in SWITCHED.items() if not all(map(DRAWN.search, found))]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What is wrong with families, by whether their branches draw random numbers."""

    def made(name):
        return tmp_path_factory.mktemp(name)

    return {
        drawn: run_distributed(run_branches, made(str(drawn)), families, drawn, world_size=1)[0]
        for drawn, families in ((False, PLAIN), (True, NOISY))
    }


@pytest.mark.parametrize("family", PLAIN)
def test_branches_train_as_the_stock_model(found, family):
    assert found[False][family] == ""


@pytest.mark.parametrize("family", NOISY)
def test_random_numbers_are_the_same_in_recomputation(found, family):
    assert found[True][family] == ""
