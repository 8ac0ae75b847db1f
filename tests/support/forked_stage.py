"""A stage as a command, in a fork of the process that has imported its packages: the import is most
of what a short stage costs.

done = forked_stage("evaluate_run", "--config", "{}", "--log", "log")

It runs as `python -m workflow.scripts.<stage>` does, to its end, in a process of its own. What a
test shows about imports, signals or other processes needs a stage that is started as a user starts
it.
"""

import gc
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.distributed import fresh_processes

ROOT = Path(__file__).resolve().parents[2]


def forked_stage(
    stage: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Return exit status, standard output and standard error.

    environment: variables that replace this process' own.
    """
    variables = dict(os.environ if environment is None else environment)
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as error:
        streams = (output.name, error.name)
        process = fresh_processes().Process(
            target=_become, args=(stage, arguments, variables, streams)
        )
        process.start()
        try:
            process.join()
        finally:
            process.kill()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(
            [stage, *arguments], process.exitcode, output.read(), error.read()
        )


def _become(
    stage: str, arguments: tuple[str, ...], variables: dict[str, str], streams: tuple[str, str]
) -> None:
    """Be a process as the command's would be."""
    gc.freeze()  # a collection would copy all that is shared with the server
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(variables)
    for number, name in enumerate(streams, start=1):
        os.dup2(os.open(name, os.O_WRONLY), number)
    sys.argv = [stage, *arguments]
    runpy.run_module(f"workflow.scripts.{stage}", run_name="__main__", alter_sys=True)
