"""Recordings of these tests are kept for them alone, not among those of who runs them."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def own_recordings(tmp_path_factory):
    """Have recordings kept in a folder of the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield
