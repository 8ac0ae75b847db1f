"""The shipped rewards, and those of users' files, as functions of (prompt, answer, row); their
calls in processes of their own, with limits of time and memory.

A call that raises, hangs, needs more memory or returns no number gives no reward but a reason; its
process is replaced. What functions print is kept apart, and its first line told."""

import importlib.util
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from workflow.lib.settings.config import RewardsConfig
from workflow.lib.settings.rounds import RewardFunction
from workflow.lib.system.environment import die_with_parent
from workflow.lib.system.errors import UserError
from workflow.lib.system.limits import RETURN_S, BoundedWork

Reward = Callable[..., Any]  # of prompt, answer, row and its options
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def last_number(prompt: str, answer: str, row: Mapping[str, Any], *, column: str = "answer") -> int:
    """Return 1 if the last number of the answer is the last one of the row's column."""
    wanted = _last_number(str(row[column]))
    if wanted is None:
        raise ValueError(f"the column {column!r} holds no number: {row[column]!r}")
    return int(_last_number(answer) == wanted)


def boxed(prompt: str, answer: str, row: Mapping[str, Any], *, column: str = "answer") -> int:
    r"""Return 1 if the last \boxed{...} of the answer has the content of the row's column, or of
    the last one there. Blanks do not count, and equal numbers are equal."""
    answered, wanted = _last_box(answer), str(row[column])
    inner = _last_box(wanted)
    return int(
        answered is not None and _plain(answered) == _plain(wanted if inner is None else inner)
    )


def regex(prompt: str, answer: str, row: Mapping[str, Any], *, pattern: str) -> int:
    """Return 1 if the regular expression occurs in the answer."""
    return int(re.search(pattern, answer) is not None)


def json_valid(
    prompt: str, answer: str, row: Mapping[str, Any], *, schema: Mapping[str, Any] | None = None
) -> int:
    """Return 1 if the answer is JSON, and valid by the schema."""
    try:
        value = json.loads(answer)
    except ValueError:
        return 0
    if schema is None:
        return 1
    # of Snakemake's packages
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    return int(Draft202012Validator(schema).is_valid(value))


def length(
    prompt: str, answer: str, row: Mapping[str, Any], *, at_least: int = 0, at_most: int = 0
) -> float:
    """Return 1 for an answer of these numbers of characters (at_most 0: any number), and of others
    the share of the bound that they keep to."""
    count = len(answer)
    if count < at_least:
        return count / at_least
    return at_most / count if at_most and count > at_most else 1.0


FUNCTIONS: Mapping[str, Reward] = {
    "last_number": last_number,
    "boxed": boxed,
    "regex": regex,
    "json": json_valid,
    "length": length,
}


def reward_of(function: RewardFunction) -> Reward:
    """Return a reward with its options; raises `UserError` if its file has no such function."""
    path = function.file
    if path is None:
        return partial(FUNCTIONS[function.function], **function.options)
    name = function.function.rpartition(":")[2]
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None, "settings allow .py files alone"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"{path} cannot be imported: {type(error).__name__}: {error}. Mend it; only "
            "score_answers runs again."
        ) from None
    if not callable(own := getattr(module, name, None)):
        raise UserError(f"{path} has no function {name}. Name one of the file's functions.")
    return partial(own, **function.options)


def _last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _plain(text: str) -> str | Decimal:
    plain = re.sub(r"\s+|\$|\\[,;!]", "", text)
    try:
        return Decimal(plain.replace(",", ""))
    except InvalidOperation:
        return plain


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, first = 1, start + len("\\boxed{")
    for end in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[first:end]
    return None


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
