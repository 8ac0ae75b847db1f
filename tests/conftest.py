"""Fixtures that several test modules share."""

import gc
import os
import signal
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.canaries import CANARIES
from tests.support.preloaded_python import VARIABLE, start_server
from tests.support.shared import current_test, made_once
from tests.support.workflow_project import LONG, Project, make_project
from workflow.lib.system.hardware import visible_gpus
from workflow.lib.system.interrupts import SIGNALS

if TYPE_CHECKING:
    from tests.support.tokenizing import Stage

# Threads of a stage that wait for each other would spin, on cores that other tests need: half of
# the processor time of a training by one process with two threads. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Hypothesis fails an example that takes 200 ms, as any may on a busy machine. The same examples
# everywhere, so that what passes here passes there.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

pytest_plugins = ["tests.support.suite"]


def pytest_configure() -> None:
    """Let Ctrl-C reach what the tests start: a shell makes its background jobs deaf to it, and all
    that they start. One server of preloaded stages serves all processes of the session, but where
    there are GPUs: their driver does not survive a fork."""
    if VARIABLE not in os.environ and not visible_gpus():
        start_server()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while the test modules are imported; nothing of that is ever garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    """Let a shared fixture that fails show its cause once; pytest would repeat it for every test
    that needs it."""
    try:
        return (yield)
    except pytest.skip.Exception:
        raise
    except BaseException:
        if fixturedef.scope != "function" and fixturedef.cached_result is not None:
            said = f"the fixture {fixturedef.argname} has failed, as {current_test()} shows"
            later = pytest.fail.Exception(said, pytrace=False)
            fixturedef.cached_result = (None, fixturedef.cached_result[1], (later, None))
        raise


@pytest.fixture(autouse=True)
def _signals_are_handled_as_before() -> Generator[None]:
    """A launcher keeps its handlers to its end, which here is that of a test."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def finished_project(shared_folder: Path) -> Project:
    """A tiny project after `snakemake all`, trained for `STEPS` steps; one for all processes. Never
    change it: work in `finished_project.copy(tmp_path)`.

    It ran with `CANARIES` in its environment; what the terminal showed is beside it, in
    `terminal.txt`."""
    return Project(made_once(shared_folder / "workflow", run_whole_workflow) / "finished")


def run_whole_workflow(folder: Path) -> None:
    project = replace(make_project(folder / "finished", train=LONG), environment=CANARIES)
    (folder / "terminal.txt").write_text(project.run("all").output)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all processes of this session; theirs are in it, each in one of its own."""
    folder: Path = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 3 layers in NF4, one for all test modules. Never change it."""
    from tests.support.models import quantized, tiny_llama  # imports torch

    folder = tmp_path_factory.mktemp("tiny")
    return quantized(tiny_llama(folder / "original"), folder / "nf4")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of 2 layers."""
    from tests.support.models import quantized, tiny_llama  # imports torch

    folder = tmp_path_factory.mktemp("two-layers")
    return quantized(tiny_llama(folder / "original", num_hidden_layers=2), folder / "nf4")


@pytest.fixture(scope="session")
def run(shared_folder: Path) -> Path:
    """A folder after a finished `finetune` stage. Never change what is there."""
    from tests.support.finished import finished  # imports torch

    return finished(shared_folder)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tokenizer, saved once for all tests of `tokenize_dataset`."""
    from tests.support.tiny import tiny_tokenizer  # imports torch, which most tests do without

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return folder


@pytest.fixture
def stage(tmp_path: Path, tokenizer_folder: Path) -> "Stage":
    """A place to run `tokenize_dataset` in."""
    from tests.support.tokenizing import Stage

    return Stage(tmp_path, tokenizer_folder)
