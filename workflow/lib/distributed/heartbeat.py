"""Heartbeats: what each process is doing, and which one blocks the others when nothing moves.

A worker's `Pulse` is a thread that writes a small file each second: the phase, and whether it
progresses (`moved`). After some seconds without progress it adds the line of Python, whether that
waits for others, and the last collective of torch's flight recorder. The launcher's `Watch` reads
all of them. A process hangs if its phase exceeds its bound and it waits for nobody, if its thread
does not beat, or if all wait: the one with the fewest phases and collectives."""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "FINETUNE_HEARTBEATS"
BEAT_S = 1.0
LASTING_S = 5.0  # after this a beat has the process's position
SILENT_S = 5.0  # a process without a beat for this long does not run at all
WARM_UP = 10.0  # bound of a step, as a multiple of the longest before it
QUIET_S = 120.0  # outside steps: without progress, or without a beat
SLOWEST_BYTES_PER_S = 10e6  # of a disk busy with other work; for all processes together
STARTING, JOINING = "starting", "joining the others"
JOIN_S = 900.0  # for the slowest machine to start Python from a shared disk
FIRST_PASS_S = 600.0  # the first forward pass, of a large model on a CPU
WAITING = "all processes of this machine wait for those of others"  # which hangs is known there
ENDED = frozenset("ZX")  # states of a process that has ended (proc(5))

logger = logging.getLogger("workflow")


@dataclass(frozen=True)
class Facts:
    """A process's heartbeat. number: of started phases; moves: in all; limit_s: bound of a phase
    without progress, silent_s: without a beat; once it lasts, at: the line of Python; waits: for
    others; collective: number and name of the newest."""

    rank: int
    pid: int
    phase: str
    number: int
    moves: int
    limit_s: float
    silent_s: float
    at: str | None = None
    waits: bool = False
    collective: tuple[int, str] | None = None


class Pulse:
    """Context manager of a worker; does nothing without a watching launcher."""

    def __init__(
        self, *, rank: int, start_s: float, step_s: float, quiet_s: float = QUIET_S
    ) -> None:
        """Take the least bounds: start_s of the start and the first step, which may compile; step_s
        of a later step; quiet_s of all else, and without any beat."""
        folder = os.environ.get(FOLDER_VARIABLE)
        self._path = Path(folder) / f"rank-{rank}.json" if folder else None
        self._rank, self._start_s, self._step_s, self._quiet_s = rank, start_s, step_s, quiet_s
        self._main = threading.get_ident()
        self._stopped, self._writing = threading.Event(), threading.Lock()
        self._steps_s: list[float] = []  # without the first one, which compiles
        self._phase, self._limit_s, self._number, self._moves = STARTING, start_s, 0, 0
        self._since_s = time.monotonic()

    def __enter__(self) -> "Pulse":
        if self._path is not None:
            self._write()
            self._thread = threading.Thread(target=self._beat, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._path is not None:
            self._thread.join()
            self._path.unlink(missing_ok=True)  # an ended process blocks nobody

    def phase(self, name: str, *, num_bytes: int = 0, least_s: float = 0.0) -> None:
        """Begin a phase outside steps (`saving`), and set its time without progress: num_bytes on a
        slow disk, at least least_s, and a forward pass."""
        logger.debug("%s", name)
        self._end_step()
        pass_s = WARM_UP * max(self._steps_s, default=0.0)
        disk_s = self._quiet_s + num_bytes / SLOWEST_BYTES_PER_S
        self._begin(name, max(disk_s, least_s, pass_s))

    def step(self, number: int) -> None:
        self._end_step()
        later_s = self._steps_s[1:]
        limit_s = max(self._step_s, WARM_UP * max(later_s)) if later_s else self._start_s
        self._begin(f"step {number}", limit_s)

    def moved(self, *_: object) -> None:
        """Note progress of this phase: its bound starts again."""
        self._moves, self._since_s = self._moves + 1, time.monotonic()

    def _end_step(self) -> None:
        if self._phase.startswith("step"):
            self._steps_s.append(time.monotonic() - self._since_s)

    def _begin(self, name: str, limit_s: float) -> None:
        self._phase, self._limit_s = name, limit_s
        self._number, self._since_s = self._number + 1, time.monotonic()
        self._write()  # at once: it may be stopped before the next beat

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_S):
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        # an ended launcher's folder is gone, too; this process gets another signal then
        with self._writing, suppress(OSError):
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(self._facts())), encoding="utf-8")
            partial.replace(self._path)

    def _facts(self) -> Facts:
        facts = Facts(
            self._rank,
            os.getpid(),
            self._phase,
            self._number,
            self._moves,
            self._limit_s,
            min(self._limit_s, self._quiet_s),
        )
        if time.monotonic() - self._since_s < LASTING_S:
            return facts
        stack = _stack(self._main)
        return replace(
            facts, at=_position(stack), waits=_waits(stack), collective=last_collective()
        )


def _stack(thread: int) -> list[traceback.FrameSummary]:
    frame = sys._current_frames().get(thread)
    return list(traceback.extract_stack(frame)) if frame else []


def _position(stack: list[traceback.FrameSummary]) -> str:
    """Return the position of a thread: the innermost line of this workflow, and of all."""
    if not stack:
        return "nowhere"
    own_frames = [entry for entry in stack if f"{os.sep}workflow{os.sep}" in entry.filename]
    chosen = (
        [*own_frames[-1:], stack[-1]]
        if own_frames and own_frames[-1] is not stack[-1]
        else [stack[-1]]
    )
    return " -> ".join(f"{Path(e.filename).name}:{e.lineno} {e.name}" for e in chosen)


def _waits(stack: list[traceback.FrameSummary]) -> bool:
    """Tell whether a thread is within torch's communication: then others may take their time."""
    return bool(stack) and f"{os.sep}torch{os.sep}distributed{os.sep}" in stack[-1].filename


def last_collective() -> tuple[int, str] | None:
    """Return number and name of the newest collective in the flight recorder, or None."""
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    dump = dump or getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    entries = json.loads(dump(True, False)).get("entries", []) if dump else []
    if not entries:
        return None
    newest = max(entries, key=lambda entry: entry["record_id"])
    return newest["record_id"] + 1, newest["profiling_name"]


@dataclass
class _Seen:
    facts: Facts
    mtime_ns: int
    beat_s: float = 0.0  # seconds without a new beat
    lasted_s: float = 0.0  # seconds without progress

    @property
    def silent(self) -> bool:
        return self.beat_s > self.facts.silent_s

    @property
    def late(self) -> bool:
        return self.lasted_s > self.facts.limit_s


class Watch:
    """The launcher's side: checks all workers. Time counts in checks: machines may sleep."""

    def __init__(self, folder: Path, *, ranks: range, size: int) -> None:
        """Take the folder of beats, this machine's ranks, and the number of all ranks."""
        self._folder, self._ranks, self._size = folder, ranks, size
        self._seen: dict[int, _Seen] = {}
        self._looked_s: float | None = None

    def look(self) -> str | None:
        """Return which process hangs and where, None if none does."""
        now = time.monotonic()
        passed_s = 0.0 if self._looked_s is None else min(now - self._looked_s, 5.0)
        self._looked_s = now
        self._seen = dict(self._notes(passed_s))
        if silent := [seen for seen in self._seen.values() if seen.silent]:
            return self._verdict(max(silent, key=lambda seen: seen.beat_s))
        awake = [seen for seen in self._seen.values() if seen.beat_s < SILENT_S]
        late = [seen for seen in self._seen.values() if seen.late]
        stuck = [seen for seen in late if not seen.facts.waits]
        if stuck or (late and all(seen.late for seen in awake)):
            return self._verdict(max(stuck or late, key=lambda seen: seen.lasted_s))
        return None

    def _notes(self, passed_s: float) -> Iterator[tuple[int, _Seen]]:
        """Yield rank and state of running workers; their end is detected elsewhere."""
        for rank in self._ranks:
            try:
                path = self._folder / f"rank-{rank}.json"
                facts = Facts(**json.loads(path.read_text("utf-8")))
                mtime_ns = path.stat().st_mtime_ns
            except (OSError, ValueError):
                continue
            if _has_ended(facts.pid):
                continue
            before = self._seen.get(rank)
            if before is None or (before.facts.number, before.facts.moves) != (
                facts.number,
                facts.moves,
            ):
                yield rank, _Seen(facts, mtime_ns)
                continue
            beat_s = 0.0 if before.mtime_ns != mtime_ns else before.beat_s + passed_s
            yield rank, _Seen(facts, mtime_ns, beat_s, before.lasted_s + passed_s)

    def _verdict(self, late: _Seen) -> str:
        quiet_s = max(late.lasted_s, late.beat_s)
        missing = [rank for rank in self._ranks if rank not in self._seen]
        if missing and late.facts.phase in (STARTING, JOINING):
            return (
                f"process {missing[0]} of {self._size} hangs before it has begun its work: the "
                f"others have waited for it for {quiet_s:.0f} s. A disk that does not answer while "
                "Python starts, or a stopped process?"
            )
        culprit = self._culprit()
        if len(self._ranks) < self._size and all(s.facts.waits for s in self._seen.values()):
            states = "; ".join(f"process {r} {_state(s)}" for r, s in sorted(self._seen.items()))
            return f"{WAITING}: nothing has moved for {quiet_s:.0f} s. {states}"
        who = f"process {culprit.facts.rank} of {self._size}"
        head = f"{who} hangs in {culprit.facts.phase}: nothing has moved for {quiet_s:.0f} s"
        if len(self._ranks) < self._size and not culprit.silent:
            # a process that waits for its GPU, and so perhaps for others, looks busy
            head += (
                ". (If another machine says the same of its own, the process with the fewest "
                "collectives holds up all)"
            )
        others = [
            f"process {rank} {_state(seen)}"
            for rank, seen in sorted(self._seen.items())
            if seen is not culprit
        ]
        return f"{head}. {who} {_state(culprit)}" + (
            f"; the others wait: {'; '.join(others)}" if others else ""
        )

    def _culprit(self) -> _Seen:
        def order(seen: _Seen) -> tuple[Any, ...]:
            facts = seen.facts
            silent_s = seen.beat_s if seen.beat_s >= SILENT_S else 0.0
            collectives, _ = facts.collective or (0, "")
            return -silent_s, facts.waits, facts.number, collectives, -seen.lasted_s

        return min(self._seen.values(), key=order)


def _has_ended(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in ENDED


def _state(seen: _Seen) -> str:
    if seen.beat_s >= SILENT_S:
        return (
            f"does not run (no sign of life for {seen.beat_s:.0f} s; stopped, or its machine "
            "is overloaded)"
        )
    number, name = seen.facts.collective or (0, "")
    last = f", last collective {name} #{number}" if number else ""
    return f"is at {seen.facts.at or seen.facts.phase}{last}"
