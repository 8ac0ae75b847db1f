"""Imports of packages that take seconds, made where they are needed."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import packages, and look for no garbage meanwhile, which is a quarter of their time. What
    they make is never garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
