"""A `python` that has imported the packages of the stages: that import takes 5 s of processor time,
most of what a stage of a tiny model takes.

start_server()                       # once in a session of tests; light until it is asked
subprocess.run([preloaded_python(), "-m", "workflow.scripts.evaluate_run", ...])

The command hands its arguments, folder, environment and open files to a server, which forks; it
passes signals on, and ends as the fork ends. Forks share the library of this checkout; a stage of
another one imports its own. What a stage starts by multiprocessing is forked too, and so are the
stages of `tests.support`, and Snakemake where a job of a cluster runs it. All else, and a stage in
whose environment packages would be imported otherwise, is run by the interpreter itself.

What a test shows about imports, process groups, the death of processes or how Python takes itself
apart needs a stage that is started as a user starts it: `Project.start` does."""

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "PRELOADED_PYTHON"  # path of the command
WORKFLOW, STAGES = "workflow", "workflow.scripts"
STAGE = f"{STAGES}."
STANDS_IN = "tests.support."  # for a stage
SPAWNED = "from multiprocessing.spawn import "
SNAKEMAKE = ["-m", "snakemake"]
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "workflow" / "scripts"
PACKAGES = (
    "multiprocessing.spawn",
    "pydantic",
    "pyarrow.parquet",
    "plotly.graph_objects",
    "torch._dynamo",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.integrations.finegrained_fp8",
    "peft.tuners.lora.bnb",
    "lm_eval.evaluator",
)
# By Snakemake, as a job of a cluster runs it; some only while it works.
PACKAGES_OF_SNAKEMAKE = ("snakemake.cli", "snakemake.report.html_reporter", "snakemake.storage")
# By these packages. Not the number of threads: Snakemake sets it for every job, and forks obey it.
# Nor XDG_CACHE_HOME: tests move recordings by it, and no package keeps anything of theirs there.
READ_AT_IMPORT = (
    *("HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT"),
    *("OMP_WAIT_POLICY", "LD_LIBRARY_PATH", "LD_PRELOAD"),
)
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SETTLED = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # the environment of tests' stages
REFUSED = b"no"
MOST_FILES, FREE = 64, 500  # open files that are handed over; numbers from here on are in no use


def preloaded_python() -> str:
    """Return the command, or the interpreter itself where no server was started."""
    return os.environ.get(VARIABLE, sys.executable)


def start_server() -> None:
    """Start the server, which ends with this process, and name its command in the environment."""
    folder = Path(tempfile.mkdtemp(prefix="preloaded-python-"))
    command = [sys.executable, "-IS", __file__, "ask", str(folder)]
    (folder / "python").write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    (folder / "python").chmod(0o755)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "socket"))
    listening.listen(64)
    with listening:
        subprocess.Popen(
            [sys.executable, __file__, "serve", str(folder), str(listening.fileno())],
            stdin=subprocess.PIPE,  # whose end it sees
            env=os.environ | SETTLED,
            pass_fds=[listening.fileno()],
            start_new_session=True,  # no signal for the tests reaches it
        )
    os.environ[VARIABLE] = str(folder / "python")


# The command.


def ask(folder: Path, arguments: list[str]) -> NoReturn:
    if _is_forked(arguments):
        files = _inherited()
        request = {
            "arguments": arguments,
            "files": files,
            "folder": str(Path.cwd()),
            "environment": dict(os.environ),
            "parent": os.getppid(),
            "ignored": [n for n in PASSED_ON if signal.getsignal(n) is signal.SIG_IGN],
        }
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / "socket"))
            answer = _answer(connection, json.dumps(request).encode(), files)
        if answer != REFUSED:
            _end_as(int(answer))
    os.execv(sys.executable, [sys.executable, *arguments])


def _is_forked(arguments: list[str]) -> bool:
    stages = (STAGE, STANDS_IN, SPAWNED)
    return arguments[:2] == SNAKEMAKE or any(word.startswith(stages) for word in arguments[1:3])


def _inherited() -> list[int]:
    """Return the numbers of the files that this process was given."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one of this listing is closed
            found += [int(path.name)] * os.get_inheritable(int(path.name))
    return sorted(found)


def _answer(connection: socket.socket, request: bytes, files: list[int]) -> bytes:
    socket.send_fds(connection, [len(request).to_bytes(8, "big")], files)
    connection.sendall(request)
    before = {
        number: signal.signal(number, lambda n, _: connection.sendall(bytes([n])))
        for number in PASSED_ON
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    answer = connection.recv(16)
    for number, handler in before.items():
        signal.signal(number, handler)
    assert answer, "the server of preloaded stages has died"
    return answer


def _end_as(status: int) -> NoReturn:
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# The server.


def serve(folder: Path, listening: socket.socket) -> NoReturn:
    """Fork a process for every request, until the tests have ended."""
    variables = dict(os.environ)
    # As where the tests were started by a script's `&`, so that forks always have to undo it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection = listening.accept()[0]
        with suppress(EOFError):
            request, files = _receive(connection)
            _import_packages()
            if request["arguments"][:2] == SNAKEMAKE:
                _import_all(PACKAGES_OF_SNAKEMAKE)
            if _imported_alike(request["environment"], variables):
                if os.fork() == 0:
                    listening.close()
                    _run(request, files, connection)
            else:
                connection.sendall(REFUSED)
            _close(files)
        connection.close()
        _reap()
    shutil.rmtree(folder)
    os._exit(0)  # what the packages tidy up takes a second


def _reap() -> None:
    """Let those go that have waited for a stage."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and its files, under other numbers."""
    length, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
    text = connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    if not text:
        raise EOFError
    return json.loads(text), files


def _imported_alike(asked: dict[str, str], own: dict[str, str]) -> bool:
    """Whether an environment gives the same packages, which read the same in it.

    Snakemake has every job look for modules in the checkout, which holds none of them."""
    loaded = {name.partition(".")[0] for name in sys.modules} - {WORKFLOW}
    places = asked.get("PYTHONPATH", "").split(os.pathsep)
    found = {path.stem for place in filter(None, places) for path in Path(place).glob("*")}
    return not found & loaded and all(asked.get(x) == own.get(x) for x in READ_AT_IMPORT)


def _import_packages() -> None:
    """Import them as a stage does, at the first request."""
    if PACKAGES[0] not in sys.modules:
        runpy.run_path(str(SCRIPTS / "__init__.py"))  # what is set before a stage imports a package
        _import_all(PACKAGES)
        _import_library()
        gc.freeze()


def _import_all(packages: Sequence[str]) -> None:
    gc.disable()
    for package in packages:
        importlib.import_module(package)
    gc.freeze()  # a collection in a fork would copy all of it
    gc.enable()


def _import_library() -> None:
    """Import what the stages of this checkout do; they themselves run as programs."""
    sys.path.insert(0, str(ROOT))
    for file in SCRIPTS.glob("*.py"):
        importlib.import_module(STAGE + file.stem)
    sys.path.pop(0)
    _forget(STAGES)


def _forget(package: str) -> None:
    """Let a package be imported anew."""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        del sys.modules[name]


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _run(request: dict[str, Any], files: list[int], connection: socket.socket) -> None:
    """Run a stage in one more fork, and wait for it."""
    child = os.fork()
    if child == 0:
        connection.close()
        _become(request, files)
    _close(files)
    _watch(child, connection)


def _watch(child: int, connection: socket.socket) -> NoReturn:
    """Pass signals on to a stage, tell how it ended, and kill it if its command was killed."""
    ended = os.pidfd_open(child)
    while ended not in select.select([connection, ended], [], [])[0]:
        numbers = connection.recv(16)
        if not numbers:
            os.kill(child, signal.SIGKILL)
            break
        for number in numbers:
            os.kill(child, number)
    _, status = os.waitpid(child, 0)
    with suppress(BrokenPipeError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Be a process as the command's would be."""
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # it is where TMPDIR was when a package asked
    # torchrun's workers end where their parent is another one
    if os.environ.get("FINETUNE_LAUNCHER") == str(request["parent"]):
        os.environ["FINETUNE_LAUNCHER"] = str(os.getppid())
    _number(files, request["files"])
    for number in PASSED_ON:
        if number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) is signal.SIG_IGN:  # as the server does, and the command not
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    search = os.environ.get("PYTHONPATH")
    places = [request["folder"], *(search.split(os.pathsep) if search else [])]
    sys.path[:0] = places
    if not _shares_library(request["arguments"], places):
        _forget(WORKFLOW)
    sys.executable = os.environ.get(VARIABLE, sys.executable)
    sys.modules["multiprocessing.spawn"].set_executable(sys.executable)
    try:
        _enter(request["arguments"])
    except SystemExit as end:
        if isinstance(end.code, str):
            raise  # Python prints it
        end_at_once(end.code or 0)
    end_at_once(0)


def _shares_library(arguments: list[str], places: list[str]) -> bool:
    """Whether it would import this checkout's library: Snakemake by its Snakefile, if nothing else
    comes before."""
    found = PathFinder.find_spec(WORKFLOW, places)
    if found is None:
        return str(ROOT / "Snakefile") in arguments
    return found.origin == str(ROOT / WORKFLOW / "__init__.py")


def end_at_once(status: int) -> NoReturn:
    """End as Python does, but leave all memory to the system: to take the packages apart copies
    what is shared with the server, and takes longer than many a stage."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _number(files: list[int], numbers: list[int]) -> None:
    """Give files the numbers that they had in the command."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, FREE) for file in files]
    _close(files)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
    _close(moved)


def _enter(arguments: list[str]) -> None:
    if "-m" in arguments:
        _, module, *rest = arguments
        sys.argv = ["-m", *rest]  # as it is while Python looks for the module
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        place = arguments.index("-c")
        sys.argv = ["-c", *arguments[place + 2 :]]
        exec(arguments[place + 1], {"__name__": "__main__"})


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(Path(sys.argv[2]), sys.argv[3:])
    sys.path.pop(0)  # the folder of this file
    serve(Path(sys.argv[2]), socket.socket(fileno=int(sys.argv[3])))
