"""Calls of reward functions in processes of their own, with limits of time and memory.

A call that raises, hangs, needs more memory or returns no number gives no reward but a reason; its
process is replaced. What functions print is kept apart, and its first line told."""

import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from workflow.lib.rounds.reward_functions import reward_of
from workflow.lib.settings.config import RewardsConfig
from workflow.lib.settings.rounds import RewardFunction
from workflow.lib.system.environment import die_with_parent
from workflow.lib.system.errors import UserError
from workflow.lib.system.limits import RETURN_S, BoundedWork

START_S = 120.0  # for a process to import the functions
Numbers = dict[str, float]


@dataclass(frozen=True)
class Call:
    """The arguments of reward functions: texts of prompt and answer, and the row by column."""

    prompt: str
    answer: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Scored:
    """The numbers of an answer by function, and the reasons of those that gave none."""

    numbers: dict[str, Numbers] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def score(
    calls: Sequence[Call],
    settings: RewardsConfig,
    *,
    processes: int,
    on_scored: Callable[[int], None],
) -> tuple[list[Scored], str]:
    """Return the results of calls in order, and the beginning of what the functions printed. Raises
    `UserError` if a function cannot be imported."""
    with tempfile.TemporaryDirectory(prefix="rewards-") as folder:
        workers = [_Worker(settings, Path(folder) / str(n)) for n in range(max(1, processes))]
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in workers:
            idle.put(worker)

        def scored(call: Call) -> Scored:
            worker = idle.get()
            try:
                result = worker.score(call)
            finally:
                idle.put(worker)
            on_scored(1)
            return result

        try:
            with ThreadPoolExecutor(len(workers)) as pool:
                results = list(pool.map(scored, calls))
        finally:
            for worker in workers:
                worker.end()
        printed = "".join(worker.printed() for worker in workers)
    return results, printed


class _Worker:
    """A process that calls functions one after the other."""

    def __init__(self, settings: RewardsConfig, output: Path) -> None:
        self._settings, self._output = settings, output
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def score(self, call: Call) -> Scored:
        scored = Scored()
        for name in self._settings.functions:
            result = self._ask(name, call)
            if isinstance(result, str):
                scored.failures[name] = result
            else:
                scored.numbers[name] = result
        return scored

    def _ask(self, name: str, call: Call) -> Numbers | str:
        """Return the numbers of a function, or why there are none."""
        if self._process is None:
            self._start()
        assert self._connection is not None, "a started process has a connection"
        try:
            self._connection.send((name, call.prompt, call.answer, call.row))
            # its own bounds come first
            if self._connection.poll(self._settings.seconds + RETURN_S):
                answer: Numbers | str = self._connection.recv()
                return answer
            reason = f"takes more than rewards.seconds = {self._settings.seconds:g}"
        except (EOFError, OSError):
            assert self._process is not None, "it was started"
            self._process.join()
            reason = f"ended its process (exit status {self._process.exitcode})"
        self.end()
        return reason

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, self._settings, self._output), daemon=True
        )
        self._process.start()
        other.close()
        try:
            failure = self._connection.recv() if self._connection.poll(START_S) else "is not ready"
        except EOFError:
            failure = "the process of the reward functions ended at its start"
        if failure is not None:
            self.end()
            raise UserError(f"rewards.functions: {failure}")

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def printed(self) -> str:
        return self._output.read_text(errors="replace")[:200] if self._output.exists() else ""


def _serve(connection: Connection, settings: RewardsConfig, output: Path) -> None:
    """Answer calls until the connection closes."""
    die_with_parent(os.getppid())
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    try:
        functions = {name: reward_of(function) for name, function in settings.functions.items()}
    except UserError as error:
        connection.send(str(error))
        return
    connection.send(None)
    bounds: Any = {"max_seconds": settings.seconds, "max_bytes": int(settings.memory_gib * 2**30)}
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        try:
            with BoundedWork("{excess} (rewards.seconds, rewards.memory_gib)", **bounds):
                result: Any = numbers_of(functions[name](*arguments))
        except UserError as error:
            result = str(error)
        except (Exception, SystemExit) as error:
            result = f"raises {type(error).__name__}: {str(error)[:200]}"
        connection.send(result)


def numbers_of(value: Any) -> Numbers:
    """Return a function's result as named numbers, a single one as `reward`; raises `TypeError` if
    it is none."""
    named = value if isinstance(value, Mapping) and value else {"reward": value}
    return {str(name): _number(number) for name, number in named.items()}


def _number(value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise TypeError(f"a reward must be a finite number, not {value!r:.100}")
    return number


def total(scored: Scored, functions: Mapping[str, RewardFunction]) -> float | None:
    """Return the weighted sum of an answer's numbers; None if a function gave none."""
    if scored.failures:
        return None
    return sum(
        function.weight * sum(scored.numbers[name].values()) for name, function in functions.items()
    )
