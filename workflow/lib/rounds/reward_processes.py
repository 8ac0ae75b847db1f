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
from multiprocessing.process import BaseProcess
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
# Arguments of reward functions: texts of prompt and answer, and the row by column.
Call = tuple[str, str, Mapping[str, Any]]


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
                return worker.score(call)
            finally:
                idle.put(worker)

        results = []
        with ThreadPoolExecutor(len(workers)) as pool:
            try:
                for result in pool.map(scored, calls):
                    results.append(result)
                    on_scored(1)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in workers:
                    worker.end()
        return results, "".join(worker.printed() for worker in workers)


Running = tuple[BaseProcess, Connection]


class _Worker:
    """A process that calls functions one after the other."""

    def __init__(self, settings: RewardsConfig, output: Path) -> None:
        self._settings, self._output = settings, output
        self._running: Running | None = None

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
        process, connection = self._running = self._running or self._started()
        try:
            connection.send((name, *call))
            # its own bounds come first
            if connection.poll(self._settings.seconds + RETURN_S):
                answer: Numbers | str = connection.recv()
                return answer
            reason = f"takes more than rewards.seconds = {self._settings.seconds:g}"
        except (EOFError, OSError):
            process.join()
            reason = f"ended its process (exit status {process.exitcode})"
        self.end()
        return reason

    def _started(self) -> Running:
        context = multiprocessing.get_context("spawn")
        connection, other = context.Pipe()
        arguments = other, self._settings, self._output
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        other.close()
        self._running = process, connection
        try:
            failure = connection.recv() if connection.poll(START_S) else "is not ready"
        except EOFError:
            failure = "the process of the reward functions ended at its start"
        if failure is not None:
            raise UserError(f"rewards.functions: {failure}")
        return self._running

    def end(self) -> None:
        if self._running is not None:
            process, connection = self._running
            process.kill()
            process.join()
            connection.close()
            self._running = None

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
