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

FIELDS = ("events", "sizes", "terms", "streams")  # of a tape, besides its work
MOST_KEPT = 64  # of 0.1 to 1 MB
FASTEST = 1  # level of compression

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


def kept_or_made(key: str, make: Callable[[], Tape]) -> Tape:
    """Return the kept recording of a key, or that which `make` returns, kept from now on."""
    try:
        file = folder() / f"{key}.json.gz"
    except RuntimeError as error:  # a user without a home
        logger.debug("recordings are not kept: %s", error)
        return make()
    if file.is_file():
        try:
            return _tape(json.loads(gzip.decompress(file.read_bytes())))
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            logger.debug("%s is made anew: %s", file, error)
    tape = make()
    try:
        _keep(file, tape)
    except OSError as error:
        logger.debug("the recording is not kept: %s", error)
    return tape


def _keep(file: Path, tape: Tape) -> None:
    fields = {name: getattr(tape, name) for name in FIELDS} | {"work": tape.work.stored()}
    text = json.dumps(fields, separators=(",", ":"))
    with atomic_path(file) as partial:
        partial.write_bytes(gzip.compress(text.encode(), FASTEST))
    oldest_first = sorted(file.parent.glob("*.json.gz"), key=lambda found: found.stat().st_mtime)
    for old in oldest_first[:-MOST_KEPT]:
        old.unlink(missing_ok=True)


def _tape(document: dict[str, Any]) -> Tape:
    tape = Tape()
    for name in FIELDS:
        setattr(tape, name, document[name])
    tape.work = Work.of(document["work"])
    return tape
