"""Peaks of recordings that need not be made again: those that are shipped with the models, and
those of this user, beside the kept tapes.

A shipped one holds for this library's versions of the engine; a test records some of them again."""

import gzip
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.work import Work
from workflow.lib.recording.kept_tapes import keep, read_kept, recording_key
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.files import json_sha256

SHIPPED = Path(__file__).resolve().parents[2] / "resources" / "models" / "peaks.json.gz"
MOST_KEPT = 1024  # of 2 kB


def known_peaks(config: Mapping[str, Any], plan: StepPlan, *, checked: bool) -> Peaks | None:
    """Return the peaks of a plan of a model, shipped or kept; None if they are neither."""
    shipped = _shipped().get(shipped_key(config, plan)) if checked else None
    if shipped is not None:
        return _peaks(shipped)
    found = read_kept(_name(config, plan, checked=checked))
    return None if found is None else _peaks(found)


def keep_peaks(config: Mapping[str, Any], plan: StepPlan, peaks: Peaks, *, checked: bool) -> None:
    """Keep the peaks of a plan for the next time, if there is a place for them."""
    keep(_name(config, plan, checked=checked), stored(peaks), most=MOST_KEPT)


def stored(peaks: Peaks) -> list[Any]:
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


def _name(config: Mapping[str, Any], plan: StepPlan, *, checked: bool) -> str:
    return f"{recording_key(config, plan, checked=checked)}.peaks.json.gz"
