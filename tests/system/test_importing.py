"""Imports that take seconds are made without looking for garbage."""

import gc

import pytest

from workflow.lib.system.environment import importing


def test_nothing_is_collected_while_packages_are_imported_and_what_they_make_never_is():
    frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(made)
    gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_on():
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
