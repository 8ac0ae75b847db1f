"""One step of every class of the installed Transformers of which a decoder can be taken."""

import pytest

from tests.support.every_class import NOT_MADE, RIGHT, every_class, outcome_in_a_process


@pytest.mark.slow
@pytest.mark.parametrize("family", every_class())
def test_class_is_trained_as_stock_does_or_refused_in_a_line(family):
    """Its own default settings, narrow; some fit no narrow model."""
    said = outcome_in_a_process(family)
    if said.startswith(NOT_MADE):
        pytest.skip(said)
    assert said == RIGHT or "\n" not in said, said
