"""Recordings kept for the next time: in the user's cache folder, compressed, by the hash of all
that decides them. Whatever is wrong there costs a recording, never a run."""

import gzip
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.work import Work
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.files import atomic_path, json_sha256

LIBRARY = Path(__file__).parents[1]
ENGINE = ("torch", "transformers", "peft", "bitsandbytes")  # besides this project's own code

MOST_KEPT = 64  # of 0.1 to 1 MB
FASTEST = 1  # level of compression

# No file, a damaged one, no place, or a user without a home.
NO_FILE = (OSError, EOFError, zlib.error, ValueError, RuntimeError)

logger = logging.getLogger("workflow")


def folder() -> Path:
    """Return where recordings are kept; the environment's XDG_CACHE_HOME moves it."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "fsdp-qlora-workflow" / "recordings"


def recording_key(config: Mapping[str, Any], plan: StepPlan, *, checked: bool) -> str:
    """Return a hash of all that decides a recording: the model, the plan and the engine's code."""
    asked = [dict(config), asdict(plan), checked]
    return json_sha256([asked, [version(name) for name in ENGINE], _code_sha256()])


@cache
def _code_sha256() -> str:
    digest = sha256()
    for file in sorted(LIBRARY.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def read_kept(name: str) -> Any:
    """Return what is kept by a file's name; None where it is not there, or damaged."""
    try:
        return json.loads(gzip.decompress((folder() / name).read_bytes()))
    except NO_FILE as error:
        logger.debug("%s is made anew: %s", name, error)
        return None


def keep(name: str, document: Any, *, most: int) -> None:
    """Keep a document, and of its kind, which is the name's ending, the `most` newest."""
    text = json.dumps(document, separators=(",", ":"))
    try:
        file = folder() / name
        with atomic_path(file) as partial:
            partial.write_bytes(gzip.compress(text.encode(), FASTEST))
        alike = file.parent.glob(f"*.{name.partition('.')[2]}")
        for old in sorted(alike, key=lambda found: found.stat().st_mtime)[:-most]:
            old.unlink(missing_ok=True)
    except NO_FILE as error:
        logger.debug("%s is not kept: %s", name, error)


def kept_or_made(key: str, make: Callable[[], Tape]) -> Tape:
    """Return the kept recording of a key, or that which `make` returns, kept from now on."""
    name = f"{key}.tape.json.gz"
    tape = Tape()
    if document := read_kept(name):
        tape.work = Work.of(document.pop("work"))
        vars(tape).update(document)
        return tape
    tape = make()
    fields = {field: getattr(tape, field) for field in vars(Tape())}
    keep(name, fields | {"work": tape.work.stored()}, most=MOST_KEPT)
    return tape
