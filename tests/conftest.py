"""Fixtures that several test modules share."""

import gc
import os
import signal
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.canaries import CANARIES
from tests.support.preloaded_python import VARIABLE, start_server
from tests.support.shared import current_test, made_once
from tests.support.workflow_project import LONG, Project, make_project
from workflow.lib.system.hardware import visible_gpus

if TYPE_CHECKING:
    from tests.support.tokenizing import Stage

# Threads of a stage that wait for each other would spin, on cores that other tests need: half of
# the processor time of a training by one process with two threads. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# By falling processor time or wait, measured on two cores. Processes take whole files: a long one
# begun last would run alone at the end. The interruptions come later than that: they wait as Slurm
# does, and the cores would have less to do.
LONGEST_FIRST = (
    "workflow/test_slurm.py",
    "training/test_families.py",
    "docs/test_readme.py",
    "recording/test_engine_run.py",
    "planning/preflight/test_presets.py",
    "training/test_loop.py",
    "training/test_checkpoint.py",
    "training/test_sharded_graphs.py",
    "workflow/test_interruptions.py",
    "training/modules_to_save/test_stock_peft.py",
    "recording/test_repeat_layers.py",
    "stages/test_download_source.py",
    "training/test_eight_bit_training.py",
    "distributed/test_packed_layers.py",
    "workflow/test_dag.py",
    "recording/test_real_engine.py",
    "recording/test_measured.py",
    "stages/test_convert_gguf.py",
    "training/test_launch.py",
    "workflow/test_errors.py",
    "stages/test_finetune.py",
    "evaluation/test_lm_eval_by_hand.py",
    "training/modules_to_save/test_run_forms.py",
    "stages/test_tokenize_restart.py",
    "project/test_resources.py",
    "planning/preflight/test_what_if.py",
    "stages/test_check_gguf.py",
    "model/architecture/test_families.py",
    "export/test_sharded_models.py",
    "distributed/test_stop_signals.py",
    "workflow/test_sweep_plan.py",
    "training/test_saved_activations.py",
    "workflow/test_kubernetes.py",
    "stages/test_consolidate_mixture.py",
    "model/loss/test_loss_scale.py",
    "training/test_best_adapter.py",
    "workflow/test_hub_run.py",
    "training/test_adapters.py",
    "training/routers/test_export.py",
    "stages/test_quantize_calibrated_mixture.py",
    "model/test_nf4_model.py",
    "stages/test_render_report.py",
    "workflow/test_run.py",
    "stages/test_publish_run.py",
    "benchmark/test_prediction.py",
    "stages/test_download_converter.py",
    "export/test_mixtures.py",
    "recording/test_trained_routers.py",
    "security/test_code.py",
    "planning/preflight/test_decision.py",
    "evaluation/test_task_files.py",
    "model/test_describe_model.py",
    "distributed/test_vocabulary_parallel.py",
    "recording/test_layer_embeddings.py",
    "training/test_steps_ahead.py",
    "planning/preflight/test_plan_search.py",
    "planning/preflight/test_replay_check.py",
    "stages/test_command.py",
    "training/test_nonfinite.py",
    "training/routers/test_run_forms.py",
    "recording/test_kernel_packages.py",
)


def pytest_configure() -> None:
    """Let Ctrl-C reach what the tests start: a shell makes its background jobs deaf to it, and all
    that they start. One server of preloaded stages serves all processes of the session, but where
    there are GPUs: their driver does not survive a fork.
    """
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; all others keep their order."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(_below_tests(item.path), len(places)))


def _below_tests(path: Path) -> str:
    return Path(os.path.relpath(path, Path(__file__).parent)).as_posix()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any],
) -> Generator[None, object, object]:
    """Let a shared fixture that fails show its cause once; pytest would repeat it for every test
    that needs it.
    """
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


@pytest.fixture(scope="session")
def finished_project(shared_folder: Path) -> Project:
    """A tiny project after `snakemake all`, trained for `STEPS` steps; one for all processes. Never
    change it: work in `finished_project.copy(tmp_path)`.

    It ran with `CANARIES` in its environment; what the terminal showed is beside it, in
    `terminal.txt`.
    """
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
