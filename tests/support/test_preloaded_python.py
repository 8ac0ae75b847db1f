"""The command that runs stages in forks runs them as the interpreter would."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tests.support.preloaded_python import SETTLED, VARIABLE, preloaded_python

pytestmark = pytest.mark.skipif(VARIABLE not in os.environ, reason="with GPUs nothing is forked")

PROBE = """
import atexit, json, os, signal, sys, threading, time

def leave(number, frame):
    print("told", number, flush=True)
    sys.exit(7)

if __name__ == "__main__":
    if sys.argv[1:] == ["wait"]:
        signal.signal(signal.SIGTERM, leave)
        print(os.getpid(), flush=True)
        time.sleep(600)
    if sys.argv[1:] == ["die"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1:] == ["refuse"]:
        sys.exit("a message")
    if sys.argv[1:] == ["end late"]:
        atexit.register(print, "at the end")
        threading.Timer(0.3, print, ["in a thread"]).start()
        sys.exit(5)
    names = ("PROBE", "OMP_NUM_THREADS")
    PASSED = ("TERM", "INT", "HUP", "USR1", "USR2")
    print("on standard error", file=sys.stderr)
    print(json.dumps({
        "preloaded": "torch" in sys.modules,
        "argv": sys.argv[1:],
        "file": __file__,
        "folder": os.getcwd(),
        "read": sys.stdin.read(),
        "environment": [os.environ.get(name) for name in names],
        "signals": [str(signal.getsignal(getattr(signal, f"SIG{name}"))) for name in PASSED],
    }))
    sys.exit(int(os.environ.get("PROBE", 0)))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose one stage tells how it was started."""
    root = tmp_path_factory.mktemp("checkout")
    scripts = root / "workflow" / "scripts"
    scripts.mkdir(parents=True)
    for folder in (scripts.parent, scripts):
        (folder / "__init__.py").touch()
    (scripts / "probe.py").write_text(PROBE)
    return root


def command(python: str, *arguments: str) -> list[str]:
    return [python, "-m", "workflow.scripts.probe", *arguments]


def environment(**changes: str) -> dict[str, str]:
    return os.environ | SETTLED | changes


def run(
    checkout: Path, python: str, *arguments: str, variables: Mapping[str, str]
) -> tuple[int, str, str]:
    done = subprocess.run(
        command(python, *arguments),
        cwd=checkout,
        env=variables,
        input="a line",
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_stage_of_any_checkout_is_run_as_by_the_interpreter(checkout):
    variables = environment(PROBE="3", OMP_NUM_THREADS="2")
    one = run(checkout, preloaded_python(), "an 'argument'", variables=variables)
    other = run(checkout, sys.executable, "an 'argument'", variables=variables)
    assert '"preloaded": true' in one[1]
    assert one == (3, other[1].replace("false", "true"), "on standard error\n")
    assert other[0] == 3


@pytest.mark.parametrize("argument", ["refuse", "end late", "die"])
def test_stage_ends_as_the_interpreter_does(checkout, argument):
    one, other = (
        run(checkout, python, argument, variables=environment())
        for python in (preloaded_python(), sys.executable)
    )
    assert one == other
    assert one[0] in (1, 5, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("variable", "value", "forked"),
    [
        ("PYTHONPATH", "{checkout}", "true"),  # as Snakemake starts it, in the results' folder
        ("PYTHONPATH", "{checkout}:{folder}", "false"),  # where another pydantic is found
        ("HF_HOME", "{folder}", "false"),  # by which packages are imported otherwise
    ],
)
def test_stage_is_forked_unless_its_environment_changes_what_it_imports(
    checkout, tmp_path, variable, value, forked
):
    (tmp_path / "pydantic.py").touch()
    changes = {variable: value.format(checkout=checkout, folder=tmp_path)}
    variables = environment(**{"PYTHONPATH": str(checkout)} | changes)
    (tmp_path / "results").mkdir()
    said = run(tmp_path / "results", preloaded_python(), variables=variables)[1]
    assert f'"preloaded": {forked}' in said


def test_what_is_no_stage_is_run_by_the_interpreter():
    code = "import sys; print('torch' in sys.modules)"
    done = subprocess.run([preloaded_python(), "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"


def waiting(checkout: Path) -> tuple["subprocess.Popen[str]", psutil.Process]:
    """Start a stage that waits; return the command and the stage."""
    process = subprocess.Popen(
        command(preloaded_python(), "wait"),
        cwd=checkout,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, psutil.Process(int(process.stdout.readline()))


def test_signal_to_the_command_is_one_to_the_stage(checkout):
    process, _ = waiting(checkout)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert (process.returncode, output) == (7, f"told {int(signal.SIGTERM)}\n")


def test_stage_does_not_outlive_its_command(checkout):
    process, stage = waiting(checkout)
    process.kill()
    process.communicate()  # until nobody has the pipe
    assert not stage.is_running() or stage.wait(timeout=1800) is None
