"""This interpreter: what it hands on to shell commands and workers, and how it imports packages."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LAUNCHER_VARIABLE = "FINETUNE_LAUNCHER"  # process id of who has started a worker


def use_this_interpreter(root: Path) -> None:
    """Let `python -m workflow.scripts.<stage>` run by this interpreter from any folder (root: the
    workflow's), in this process and what it starts; a conda environment goes before it."""
    search = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    os.environ["PATH"] = os.pathsep.join(search)
    modules = [str(root), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, modules))


def is_worker() -> bool:
    """Tell whether this process was started by torchrun (or by `launch_workers`)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def importing() -> Iterator[None]:
    """Import packages without garbage collection, a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
