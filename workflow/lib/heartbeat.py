"""Signs of life: what each process is doing, told once a second, and who holds up the others when nothing moves.

A worker's `Pulse` is a thread that writes a small file. Its main thread names the phase it is in. If that lasts, the
file also tells the line of Python at which the main thread is, and the last collective of torch's flight recorder
(for gloo and NCCL alike). The launcher's `diagnose` reads the files of all its workers: the process that has begun
fewer collectives than the others, or whose thread does not even beat, is the one that the others wait for.
"""

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "FINETUNE_HEARTBEATS"
BEAT_S = 1.0
LASTING_S = 5.0  # from then on a beat tells where the process is
SILENT_S = 5.0  # a process without a beat for so long does not run at all
WARM_UP = 10.0  # a step may take so many times the longest before it


class Pulse:
    """Context manager of a worker; does nothing if its launcher watches nothing."""

    def __init__(self, *, rank: int, start_s: float, step_s: float) -> None:
        """start_s: the longest that anything outside steps may take; step_s: the least that a step may take."""
        folder = os.environ.get(FOLDER_VARIABLE)
        self._path = Path(folder) / f"rank-{rank}.json" if folder else None
        self._rank, self._start_s, self._step_s = rank, start_s, step_s
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._longest_s: float | None = None
        self._phase, self._number, self._limit_s = "starting", 0, start_s
        self._since_s = time.monotonic()

    def __enter__(self) -> "Pulse":
        if self._path is not None:
            self._tell(self._path)
            threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def phase(self, name: str) -> None:
        """Say what begins now, outside steps (`saving`)."""
        self._end_step()
        self._begin(name, self._start_s)

    def step(self, number: int) -> None:
        """Say that the step `number` (1-based) begins now."""
        self._end_step()
        limit_s = self._start_s
        if self._longest_s is not None:
            limit_s = max(self._step_s, WARM_UP * self._longest_s)
        self._begin(f"step {number}", limit_s)

    def _end_step(self) -> None:
        """Learn how long a step takes; the first one, which compiles and allocates, says nothing."""
        if self._phase.startswith("step") and self._number > 1:
            took_s = time.monotonic() - self._since_s
            self._longest_s = max(took_s, self._longest_s or 0.0)

    def _begin(self, name: str, limit_s: float) -> None:
        self._phase, self._limit_s = name, limit_s
        self._number, self._since_s = self._number + 1, time.monotonic()

    def _beat(self) -> None:
        assert self._path is not None
        while not self._stopped.wait(BEAT_S):
            try:
                self._tell(self._path)
            except OSError:  # the launcher has gone, and its folder with it
                return

    def _tell(self, path: Path) -> None:
        facts: dict[str, Any] = {
            "rank": self._rank, "pid": os.getpid(), "phase": self._phase, "number": self._number,
            "limit_s": self._limit_s,
        }  # fmt: skip
        if time.monotonic() - self._since_s >= LASTING_S:
            facts |= {"at": _place(self._main), "collective": last_collective()}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(facts), encoding="utf-8")
        partial.replace(path)


def _place(thread: int) -> str:
    """Return where a thread is: the innermost line of this workflow, and the innermost of all."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "nowhere"
    stack = traceback.extract_stack(frame)
    ours = [entry for entry in stack if f"{os.sep}workflow{os.sep}" in entry.filename]
    chosen = [*ours[-1:], stack[-1]] if ours and ours[-1] is not stack[-1] else [stack[-1]]
    return " -> ".join(f"{Path(e.filename).name}:{e.lineno} {e.name}" for e in chosen)


def last_collective() -> dict[str, Any] | None:
    """Return number and name of the newest collective in torch's flight recorder, None without one."""
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    dump = dump or getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    entries = json.loads(dump(True, False)).get("entries", []) if dump else []
    if not entries:
        return None
    newest = max(entries, key=lambda entry: entry["record_id"])
    return {"number": newest["record_id"] + 1, "name": newest["profiling_name"]}


@dataclass
class _Seen:
    facts: dict[str, Any]
    beat_s: float  # how long no new beat has come
    lasted_s: float  # how long it has been in this phase
    mtime_ns: int


class Watch:
    """The launcher's side: look at all workers now and then; `hung` tells what holds them up.

    Time counts in looks, so a machine that slept in between has not hung.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[int, _Seen] = {}
        self._looked_s: float | None = None

    def look(self) -> str | None:
        """Return who hangs and where, None if nobody does."""
        now = time.monotonic()
        passed_s = 0.0 if self._looked_s is None else min(now - self._looked_s, 5.0)
        self._looked_s = now
        for path in self._folder.glob("rank-*.json"):
            self._note(path, passed_s)
        late = [seen for seen in self._seen.values() if seen.lasted_s > seen.facts["limit_s"]]
        return self._verdict(max(late, key=lambda seen: seen.lasted_s)) if late else None

    def pids(self) -> list[int]:
        """Process ids of all workers that have been seen."""
        return [seen.facts["pid"] for seen in self._seen.values()]

    def _note(self, path: Path, passed_s: float) -> None:
        try:
            facts, mtime_ns = json.loads(path.read_text(encoding="utf-8")), path.stat().st_mtime_ns
        except (OSError, ValueError):
            return
        known = self._seen.get(facts["rank"])
        if known is None or known.facts["number"] != facts["number"]:
            self._seen[facts["rank"]] = _Seen(facts, 0.0, 0.0, mtime_ns)
            return
        known.beat_s = 0.0 if known.mtime_ns != mtime_ns else known.beat_s + passed_s
        known.facts, known.mtime_ns = facts, mtime_ns
        known.lasted_s += passed_s

    def _verdict(self, late: _Seen) -> str:
        culprit = self._culprit()
        who = f"process {culprit.facts['rank']} of {len(self._seen)}"
        head = f"{who} hangs in {late.facts['phase']}: nothing has moved for {late.lasted_s:.0f} s"
        return f"{head}. {who} {_state(culprit)}; the others wait: " + "; ".join(
            f"process {rank} {_state(seen)}"
            for rank, seen in sorted(self._seen.items())
            if seen is not culprit
        )

    def _culprit(self) -> _Seen:
        def order(seen: _Seen) -> tuple[Any, ...]:
            collective = seen.facts.get("collective") or {"number": 0}
            return (seen.beat_s < SILENT_S, seen.facts["number"], collective["number"])

        return min(self._seen.values(), key=order)


def _state(seen: _Seen) -> str:
    if seen.beat_s >= SILENT_S:
        return f"does not run (no sign of life for {seen.beat_s:.0f} s; stopped, or its machine is overloaded)"
    collective = seen.facts.get("collective")
    last = f", last collective {collective['name']} #{collective['number']}" if collective else ""
    return f"is at {seen.facts.get('at', seen.facts['phase'])}{last}"
