"""Peaks of recordings that need not be made again: those that are shipped with the models, and
those of this user, beside the kept tapes.

A shipped one holds for this library's versions of the engine; a test records some of them again."""

import gzip
import json
import logging
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.work import Work
from workflow.lib.recording.kept_tapes import folder, recording_key
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.files import atomic_path, json_sha256

SHIPPED = Path(__file__).resolve().parents[2] / "resources" / "models" / "peaks.json.gz"
MOST_KEPT = 1024  # of 2 kB

logger = logging.getLogger("workflow")


def known_peaks(config: Mapping[str, Any], plan: StepPlan, *, checked: bool) -> Peaks | None:
    """Return the peaks of a plan of a model, shipped or kept; None if they are neither."""
    shipped = _shipped().get(shipped_key(config, plan)) if checked else None
    if shipped is not None:
        return _peaks(shipped)
    file = _file(config, plan, checked=checked)
    try:
        return _peaks(json.loads(file.read_bytes())) if file else None
    except (OSError, ValueError, TypeError) as error:
        logger.debug("%s is made anew: %s", file, error)
        return None


def keep_peaks(config: Mapping[str, Any], plan: StepPlan, peaks: Peaks, *, checked: bool) -> None:
    """Keep the peaks of a plan for the next time, if there is a place for them."""
    file = _file(config, plan, checked=checked)
    if file is None:
        return
    try:
        with atomic_path(file) as partial:
            partial.write_text(json.dumps(stored(peaks)), encoding="utf-8")
        oldest_first = sorted(file.parent.glob("*.peaks.json"), key=lambda x: x.stat().st_mtime)
        for old in oldest_first[:-MOST_KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.debug("the peaks are not kept: %s", error)


def stored(peaks: Peaks) -> list[Any]:
    """Return peaks as JSON."""
    return [peaks.phases, peaks.host_bytes, peaks.work.stored()]


def _peaks(document: list[Any]) -> Peaks:
    phases, host_bytes, work = document
    return Peaks(phases, host_bytes, Work.of(work))


def shipped_key(config: Mapping[str, Any], plan: StepPlan) -> str:
    """Return the key of a shipped recording: the model, and what the plan says besides defaults."""
    defaults: dict[str, Any] = {
        entry.name: {} if entry.default_factory is not MISSING else entry.default
        for entry in fields(StepPlan)
    }
    said = {name: value for name, value in asdict(plan).items() if value != defaults[name]}
    return json_sha256([dict(config), said])[:16]


@cache
def _shipped() -> dict[str, list[Any]]:
    if not SHIPPED.is_file():
        return {}
    document: dict[str, list[Any]] = json.loads(gzip.decompress(SHIPPED.read_bytes()))
    return document


def _file(config: Mapping[str, Any], plan: StepPlan, *, checked: bool) -> Path | None:
    key = recording_key(config, plan, checked=checked)
    try:
        return folder() / f"{key}.peaks.json"
    except RuntimeError as error:  # a user without a home
        logger.debug("recordings are not kept: %s", error)
        return None
