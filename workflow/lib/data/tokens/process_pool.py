"""Tasks spread over any number of processes; results come in the order of the tasks.

Processes are forked, so they share loaded data; nothing with threads (torch, parallel tokenizers)
may have run before. They ignore Ctrl-C, which their parent handles: it kills them. They end with
their parent, and are watched as it is."""

import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

from workflow.lib.system.environment import die_with_parent
from workflow.lib.system.errors import UserError
from workflow.lib.system.hardware import shared_memory_fault
from workflow.lib.system.limits import excess_of_pool, join_watch

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

Task = TypeVar("Task")
Result = TypeVar("Result")


class KilledError(UserError):
    """A process of the pool was killed from outside."""


AHEAD = 3  # tasks per process that wait in memory: one in work, two to bridge the reader's pauses

# This process's function of a task: set once by `_prepare` in a process of the pool.
_work: list[Callable[[Any], Any]] = []


def available_processes() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def map_in_order(
    tasks: Iterable[Task],
    *,
    prepare: Callable[[], Callable[[Task], Result]],
    processes: int,
    alone: int,
) -> Iterator[Result]:
    """Yield `prepare()(task)` for each task, in order, at most `AHEAD` per process in memory; all
    picklable. One process, or up to `alone` tasks, run here. An exception of a task is raised here;
    `UserError` without shared memory, or of work that the watcher ended; `KilledError` if a process
    is killed."""
    tasks = iter(tasks)
    first = list(islice(tasks, alone + 1))
    if processes == 1 or len(first) <= alone:
        yield from map(prepare(), chain(first, tasks))
        return
    if (fault := shared_memory_fault()) is not None:
        raise UserError(f"{fault}.")
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(
        processes,
        mp_context=context,
        initializer=_prepare,
        initargs=(prepare, os.getpid(), context.Value("i", 0)),
    )
    waiting: deque[Future[Result]] = deque()
    # else every process' collector writes to, and so copies, the pages shared with this one
    gc.freeze()
    try:
        for task in chain(first, tasks):
            waiting.append(pool.submit(_run, task))
            if len(waiting) >= processes * AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        if (excess := excess_of_pool()) is not None:
            raise excess from None
        raise KilledError(
            f"One of {processes} working processes was killed, most likely because memory ran out. "
            "Start it again with fewer cores (--cores) or more memory; finished work is kept."
        ) from None
    except BaseException:
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        gc.unfreeze()


def _prepare(
    prepare: Callable[[], Callable[[Any], Any]], parent: int, begun: "Synchronized[int]"
) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with begun.get_lock():
        join_watch(begun.value)
        begun.value += 1
    _work[:] = [prepare()]


def _run(task: Any) -> Any:
    return _work[0](task)
