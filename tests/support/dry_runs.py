"""Runs of Snakemake, each in a fork of one process that has imported it: that import is most of
what a dry run costs.

status, output = forked_run(["--dry-run", "all"], folder=root, environment=dict(os.environ))

What is forked calls the function that the command `snakemake` calls; it starts the jobs of a real
run as that does, by the interpreter `python`. Of a workflow it knows the modules that the rules of
this repository import, and forgets them where it runs another. Runs that get signals are started as
a user starts them (`Project.start`)."""

import gc
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

LOADED_LATE = (  # by Snakemake and by the workflow, in every run
    "pydantic",
    "snakemake.report.html_reporter",
    "snakemake.storage",
)


REPOSITORY = Path(__file__).resolve().parents[2]
IMPORT = re.compile(r"^from (workflow\.\S+) import", re.MULTILINE)


class Request(NamedTuple):
    """A run: arguments, working directory, environment, the interpreter of its jobs, and the file
    for what a user would see."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    python: str
    output: str


def forked_run(
    arguments: list[str], *, folder: Path, environment: dict[str, str], python: str = sys.executable
) -> tuple[int, str]:
    """Return exit status, and standard output and error together. A test that is stopped meanwhile
    ends the run and all it started."""
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as file:
        request = Request(arguments, str(folder), environment, python, file.name)
        server = _running_server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        try:
            status = int(server.stdout.readline())
        except BaseException:
            _end(server)
            raise
        return status, file.read()


def _end(server: "subprocess.Popen[str]") -> None:
    """Kill the server and all below it: the next run gets another."""
    for process in [*psutil.Process(server.pid).children(recursive=True), server]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    server.wait()


def _running_server() -> "subprocess.Popen[str]":
    """Return the server, a new one if a test has ended the last: it remembers nothing."""
    if _server().poll() is not None:
        _server.cache_clear()
    return _server()


@cache
def _server() -> "subprocess.Popen[str]":
    """Start this file, which ends with this process, in a session of its own: no signal for others
    reaches it. -I: nothing of the environment decides what it imports."""
    return subprocess.Popen(
        [sys.executable, "-I", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def serve(requests: Iterator[str]) -> None:
    """Make the runs that are asked for, one after the other, and tell how each ended."""
    gc.disable()
    sys.path.insert(0, str(REPOSITORY))
    from snakemake.cli import main

    from tests.support.preloaded_python import end_at_once

    import_late()
    sys.path.pop(0)
    gc.freeze()  # a collection in a fork would copy all of it
    gc.enable()
    for line in requests:
        child = os.fork()
        if child == 0:
            become(Request(*json.loads(line)))
            try:
                main()
            except SystemExit as end:
                end_at_once(int(end.code or 0))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def import_late() -> None:
    rules = [file.read_text(encoding="utf-8") for file in REPOSITORY.glob("workflow/rules/*.smk")]
    for module in (*LOADED_LATE, *IMPORT.findall("".join(rules))):
        importlib.import_module(module)


def forget(packages: set[str]) -> None:
    """Let the modules of these packages be imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


def become(request: Request) -> None:
    """Be a process as the command's would be."""
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(request.output, os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    search = request.environment.get("PYTHONPATH")
    places = search.split(os.pathsep) if search else []
    sys.path[:0] = [request.folder, *places]
    if places or str(REPOSITORY / "Snakefile") not in request.arguments:
        # what stands in these places comes before what is installed
        forget({"workflow"} | {path.stem for place in places for path in Path(place).glob("*")})
    sys.argv = ["snakemake", *request.arguments]
    sys.executable = request.python


if __name__ == "__main__":
    serve(sys.stdin)
