"""Recordings cached in the user's cache folder, compressed, by the hash of all their inputs. A
fault there costs a recording, never a run.

Peaks alone are smaller: some are shipped with the models, for this library's versions of the
engine; a test records some of them again."""

import gzip
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.work import Work
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.files import atomic_path, json_sha256

LIBRARY = Path(__file__).parents[1]
ENGINE = ("torch", "transformers", "peft", "bitsandbytes")  # besides this project's own code

MOST_KEPT = 64  # of 0.1 to 1 MB
FASTEST = 1  # level of compression

# No file, a damaged one, no folder, or a user without a home.
NO_FILE = (OSError, EOFError, zlib.error, ValueError, RuntimeError)

logger = logging.getLogger("workflow")


def folder() -> Path:
    """Return the cache folder; XDG_CACHE_HOME moves it."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "fsdp-qlora-workflow" / "recordings"


def recording_key(config: Mapping[str, Any], plan: StepPlan, *, checked: bool) -> str:
    """Return a hash of a recording's inputs: the model, the plan and the engine's code."""
    inputs = [dict(config), asdict(plan), checked]
    # without the build (`+cu130`): fake tensors have the same sizes in all of a release
    releases = [version(name).partition("+")[0] for name in ENGINE]
    return json_sha256([inputs, releases, _code_sha256()])


@cache
def _code_sha256() -> str:
    digest = sha256()
    for file in sorted(LIBRARY.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def read_kept(name: str) -> Any:
    """Return the cached document of a file's name; None if it is missing, or damaged."""
    try:
        return json.loads(gzip.decompress((folder() / name).read_bytes()))
    except NO_FILE as error:
        logger.debug("%s is made anew: %s", name, error)
        return None


def keep(name: str, document: Any, *, most: int) -> None:
    """Cache a document, and keep the `most` newest of its kind, which is the name's ending."""
    text = json.dumps(document, separators=(",", ":"))
    try:
        file = folder() / name
        with atomic_path(file) as partial:
            partial.write_bytes(gzip.compress(text.encode(), FASTEST))
        alike = file.parent.glob(f"*.{name.partition('.')[2]}")
        for old in sorted(alike, key=lambda file: file.stat().st_mtime)[:-most]:
            old.unlink(missing_ok=True)
    except NO_FILE as error:
        logger.debug("%s is not kept: %s", name, error)


def kept_or_made(key: str, make: Callable[[], Tape]) -> Tape:
    """Return the cached recording of a key, or cache the result of `make`."""
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


SHIPPED = Path(__file__).resolve().parents[2] / "resources" / "models" / "peaks.json.gz"
MOST_PEAKS_KEPT = 1024  # of 2 kB


def known_peaks(config: Mapping[str, Any], plan: StepPlan, *, checked: bool) -> Peaks | None:
    """Return the peaks of a plan of a model, shipped or cached; None without either."""
    shipped = _shipped().get(shipped_key(config, plan)) if checked else None
    if shipped is not None:
        return _peaks(shipped)
    document = read_kept(_name(config, plan, checked=checked))
    return None if document is None else _peaks(document)


def keep_peaks(config: Mapping[str, Any], plan: StepPlan, peaks: Peaks, *, checked: bool) -> None:
    """Cache the peaks of a plan, if there is a folder for them."""
    keep(_name(config, plan, checked=checked), stored(peaks), most=MOST_PEAKS_KEPT)


def stored(peaks: Peaks) -> list[Any]:
    """Return peaks as JSON values: bytes by phase and term, host bytes, work."""
    return [peaks.phases, peaks.host_bytes, peaks.work.stored()]


def _peaks(document: list[Any]) -> Peaks:
    phases, host_bytes, work = document
    return Peaks(phases, host_bytes, Work.of(work))


def shipped_key(config: Mapping[str, Any], plan: StepPlan) -> str:
    """Return the key of a shipped recording: the model, and the plan without defaults."""
    defaults: dict[str, Any] = {
        entry.name: {} if entry.default_factory is not MISSING else entry.default
        for entry in fields(StepPlan)
    }
    changed_fields = {
        name: value for name, value in asdict(plan).items() if value != defaults[name]
    }
    return json_sha256([dict(config), changed_fields])[:16]


@cache
def _shipped() -> dict[str, list[Any]]:
    if not SHIPPED.is_file():
        return {}
    document: dict[str, list[Any]] = json.loads(gzip.decompress(SHIPPED.read_bytes()))
    return document


def _name(config: Mapping[str, Any], plan: StepPlan, *, checked: bool) -> str:
    return f"{recording_key(config, plan, checked=checked)}.peaks.json.gz"
