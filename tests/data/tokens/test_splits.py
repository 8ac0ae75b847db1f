"""How often an epoch takes each document of weighted sources."""

import numpy as np
import pytest

from workflow.lib.data.tokens.splits import drawn, times_taken

DOCUMENTS = 7


def times(weight, *, source=1, seed=0):
    return times_taken(DOCUMENTS, weight=weight, source=source, seed=seed).tolist()


@pytest.mark.parametrize(
    ("weight", "total"), [(2.0, 14), (0.5, 4), (2.3, 16), (0.01, 1), (100.0, 700)]
)
def test_weight_is_the_share_of_a_sources_documents_that_an_epoch_takes(weight, total):
    counts = times(weight)
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1


def test_seed_and_source_decide_which_documents_are_taken():
    assert len({tuple(times(0.5, seed=seed)) for seed in range(5)}) > 1
    assert len({tuple(times(0.5, source=source)) for source in range(5)}) > 1
    assert times(0.5) == times(0.5)


def test_draw_is_the_beginning_of_numpys_permutation_in_half_its_memory():
    order = np.random.Generator(np.random.PCG64([3, 1])).permutation(10_007)
    numbers = drawn(500, total=10_007, seed=[3, 1])
    assert numbers.tolist() == order[:500].tolist()
    assert numbers.dtype == np.uint32
