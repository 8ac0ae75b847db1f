"""How often an epoch takes each document of weighted sources."""

import numpy as np
import pytest

from workflow.lib.mixture import repeated

SOURCES = np.array([0, 1, 0, 1, 1, 2, 0, 1, 1, 1, 1])  # three, seven and one document


def counts(*weights: float, seed: int = 0) -> list[int]:
    places = repeated(SOURCES, weights=weights, seed=seed)
    return np.bincount(places, minlength=len(SOURCES)).tolist()


def test_weight_one_takes_every_document_once_in_order() -> None:
    assert repeated(SOURCES, weights=[1.0] * 3, seed=0).tolist() == list(range(len(SOURCES)))


@pytest.mark.parametrize(("weight", "taken"), [(2.0, 14), (0.5, 4), (2.3, 16), (0.01, 1)])
def test_weight_is_the_share_of_a_sources_documents_that_an_epoch_takes(
    weight: float, taken: int
) -> None:
    own = np.array(counts(1.0, weight, 1.0))[SOURCES == 1]
    assert own.sum() == taken
    assert own.max() - own.min() <= 1


def test_weight_of_one_source_changes_nothing_in_the_others() -> None:
    first, second = (np.array(counts(0.5, weight, 1.5)) for weight in (1.0, 3.0))
    assert first[SOURCES != 1].tolist() == second[SOURCES != 1].tolist()


def test_seed_decides_which_documents_are_taken() -> None:
    draws = {tuple(counts(1.0, 0.5, 1.0, seed=seed)) for seed in range(5)}
    assert len(draws) > 1
    assert counts(1.0, 0.5, 1.0) == counts(1.0, 0.5, 1.0)
