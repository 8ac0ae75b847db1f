"""Mistakes of a user, through the real Snakefile: stopped before training, by one message, with no
traceback.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos import small_disk
from tests.support.models import tiny_llama
from tests.support.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.support.workflow_project import TIMEOUT_S, Project, executed, make_project, qa_rows
from workflow.lib.settings.config import merge
from workflow.lib.system.errors import UserError
from workflow.lib.system.hardware import check_writable

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 3


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project in which nothing has run."""
    return make_project(tmp_path_factory.mktemp("errors") / "fresh")


@pytest.fixture(scope="module")
def described(fresh: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose model is described."""
    project = fresh.copy(tmp_path_factory.mktemp("errors") / "described")
    (job,) = project.plan("tokenize")["describe_model"]
    project.run(f"results/models/{job.wildcards['model']}/description.json")
    return project


@pytest.fixture(scope="module")
def tokenized(described: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with its tokens made, so that preflight is the next to run."""
    project = described.copy(tmp_path_factory.mktemp("errors") / "tokenized")
    project.run("tokenize")
    return project


def refusal(project: Project, *, after: list[str], target: str = "all") -> str:
    """Run, expect to be refused when exactly the jobs `after` have been started; return what the
    user sees.
    """
    done = project.snakemake(target)
    assert done.status == 1, done.output
    assert "Traceback" not in done.output
    assert sorted(executed(done.output)) == sorted(after)
    return done.output


def assert_said(output: str, *parts: str) -> None:
    """Expect one line with all parts of the message among the last ones, where a user looks."""
    end = output.splitlines()[-6:]
    assert [all(part in line for part in parts) for line in end].count(True) == 1, output


# Seen when the Snakefile is read: edit, and what the message says (setting, value, bound, change).
UNREADABLE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "misspelt key": ({"lora": {"alhpa": 8}}, ["lora.alhpa", "no such key", "Did you mean 'alpha'"]),
    "misspelt section": ({"trian": {"seed": 1}}, ["trian", "no such key", "Did you mean 'train'"]),
    "value out of range": (
        {"train": {"learning_rate": 7}},
        ["train.learning_rate = 7", "at most 1.0", "Change it in config.yaml"],
    ),
    "value of a wrong type": ({"lora": {"r": "many"}}, ["lora.r = 'many'", "a whole number"]),
    "several nodes on one machine": (
        {"hardware": {"nodes": 2}},
        ["hardware.nodes = 2", "this machine is one node", "--profile workflow/profiles/slurm"],
    ),
    "mistake in one run": (
        {"runs": {"demo": {"lora": {"r": 0}}}},
        ["runs.demo.lora.r = 0", "at least 1", "Change it in config.yaml"],
    ),
    "no such model": ({"model": {"source": "./nowhere"}}, ["model.source = './nowhere'", "hub id"]),
    "no such dataset": (
        {"data": {"train": "data/none.jsonl"}},
        ["data.train = 'data/none.jsonl'", "no such file", "Give a path that exists"],
    ),
}
# The same, where the model is described; else the description, which comes first, says it.
UNSUITED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no such layer": (
        {"lora": {"target_modules": ["q_prj"]}},
        ["run demo: lora.target_modules = 'q_prj'", "q_proj, k_proj", "all-linear"],
    ),
    "rows longer than the model can read": (
        {"data": {"seq_len": 131}},
        ["data.seq_len = 131", "max_position_embeddings is 128", "or below"],
    ),
    "batch that the processes of the settings cannot share": (
        {"train": {"global_batch_size": 5}, "hardware": {"gpus": 0, "cpu_processes": 2}},
        ["train.global_batch_size = 5", "multiple of the 2 processes", "Set it to 4 or 6"],
    ),
    "more processes than rows of a step": (
        {"train": {"global_batch_size": 4}, "hardware": {"gpus": 0, "cpu_processes": 8}},
        ["train.global_batch_size = 4", "multiple of the 8 processes", "Set it to 8,"],
    ),
}


@pytest.mark.parametrize(("edit", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_wrong_setting_stops_before_any_job(
    fresh: Project, tmp_path: Path, edit: dict[str, Any], message: list[str]
) -> None:
    project = fresh.copy(tmp_path / "project")
    project.edit(edit)
    assert_said(refusal(project, after=[]), *message)


@pytest.mark.parametrize(("edit", "message"), UNSUITED.values(), ids=UNSUITED)
def test_setting_that_does_not_suit_a_described_model_stops_before_any_job(
    described: Project, tmp_path: Path, edit: dict[str, Any], message: list[str]
) -> None:
    project = described.copy(tmp_path / "project")
    project.edit(edit)
    assert_said(refusal(project, after=[]), *message)


def test_setting_that_does_not_suit_a_new_model_stops_at_its_description(
    fresh: Project, tmp_path: Path
) -> None:
    project = fresh.copy(tmp_path / "project")
    edit, message = UNSUITED["no such layer"]
    project.edit(edit)
    assert_said(refusal(project, after=["describe_model"]), *message)


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Make a folder read-only, by its mode or, for root, whom no mode stops, by its disk."""
    folder.mkdir(exist_ok=True)
    with small_disk(folder) as mounted:
        if not mounted and os.geteuid() == 0:
            pytest.skip("root may write anything, and mount nothing here")
        if mounted:
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        else:
            folder.chmod(0o555)
        try:
            yield
        finally:
            if not mounted:
                folder.chmod(0o755)


@pytest.mark.parametrize("name", ["results", ".snakemake"])
def test_folder_that_cannot_be_written_is_named_before_any_job(
    fresh: Project, tmp_path: Path, name: str
) -> None:
    """Snakemake's own folder too: it would tell by a traceback."""
    project = fresh.copy(tmp_path / "project")
    with unwritable(project.root / name):
        output = refusal(project, after=[])
    assert_said(output, f"{name} cannot be written: its", "Mend that, and repeat the command")


def test_full_disk_is_told_before_any_job(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as mounted:
        if not mounted:
            pytest.skip("nothing can be mounted here")
        check_writable([tmp_path / "disk" / "results"])
        with (tmp_path / "disk" / "ballast").open("wb") as ballast, suppress(OSError):
            while ballast.write(bytes(2**20)):
                ballast.flush()
        with pytest.raises(UserError, match=r"results cannot be written: its disk is full \("):
            check_writable([tmp_path / "disk" / "results"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_any_job_ends_the_command_with_a_word(
    fresh: Project, tmp_path: Path, number: signal.Signals
) -> None:
    """It arrives while the graph of a hundred runs is built, which takes seconds."""
    project = fresh.copy(tmp_path / "project")
    project.edit({"runs": {f"run{seed}": {"train": {"seed": seed}} for seed in range(100)}})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's `&` ignores it
    try:
        process = project.start("--dry-run", "all")
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    assert any("Building DAG" in line for line in process.stdout)
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "interrupted; the same command takes up the work again" in output
    assert "Traceback" not in output


def write_png(project: Project) -> None:
    (project.root / "data" / "train.jsonl").write_bytes(PNG)


def write_nothing(project: Project) -> None:
    (project.root / "data" / "train.jsonl").write_bytes(b"")


def write_other_columns(project: Project) -> None:
    rows = ({"asked": row["prompt"], "said": row["completion"]} for row in qa_rows(first=0, rows=5))
    lines = (json.dumps(row) + "\n" for row in rows)
    (project.root / "data" / "train.jsonl").write_text("".join(lines))


def drop_chat_template(project: Project) -> None:
    shutil.rmtree(project.root / "model")
    tiny_llama(project.root / "model", vocab_size=VOCAB_SIZE)
    tiny_tokenizer(project.root / "model", chat_template=False)


def drop_pad_and_eos(project: Project) -> None:
    tiny_tokenizer(project.root / "model", pad=False)
    path = project.root / "model" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["eos_token"]
    path.write_text(json.dumps(settings))


Mistake = tuple[Callable[[Project], None], list[str]]
UNUSABLE_DATA: list[Mistake] = [
    (write_png, ["data.train = 'data/train.jsonl'", "PNG image", "Name a .jsonl file"]),
    (write_nothing, ["data.train = 'data/train.jsonl'", "no row", "Name a file with rows"]),
    (
        write_other_columns,
        ["data.format = 'auto'", "'asked', 'said'", "prompt, completion", "data.columns"],
    ),
]
UNUSABLE_TOKENIZERS: list[Mistake] = [
    (
        drop_chat_template,
        ["data.chat_template = None", "tokenizer has none", "Name a Jinja file"],
    ),
    (drop_pad_and_eos, ["model.source = 'model'", "no eos token", "tokenizer_config.json"]),
]


@pytest.mark.parametrize(
    ("change", "message"), UNUSABLE_DATA, ids=[change.__name__ for change, _ in UNUSABLE_DATA]
)
def test_unusable_data_stop_at_tokenization(
    described: Project, tmp_path: Path, change: Callable[[Project], None], message: list[str]
) -> None:
    project = described.copy(tmp_path / "project")
    change(project)
    assert_said(refusal(project, after=["tokenize_dataset"]), *message)


@pytest.mark.parametrize(
    ("change", "message"),
    UNUSABLE_TOKENIZERS,
    ids=[change.__name__ for change, _ in UNUSABLE_TOKENIZERS],
)
def test_unusable_tokenizer_stops_at_tokenization(
    fresh: Project, tmp_path: Path, change: Callable[[Project], None], message: list[str]
) -> None:
    project = fresh.copy(tmp_path / "project")
    change(project)
    assert_said(refusal(project, after=["describe_model", "tokenize_dataset"]), *message)


def test_gain_that_no_task_measures_stops_at_preflight(tokenized: Project, tmp_path: Path) -> None:
    project = tokenized.copy(tmp_path / "project")
    project.edit({"evaluate": {"require": {"pydocs_mc/acc": 0.1}}})
    said = "not among the tasks that are run (none)"
    seen = refusal(project, after=["preflight_run"])
    assert_said(seen, "evaluate.require = 'pydocs_mc/acc'", said)


# Seen when the model is described, on the machine that trains; where it is, by preflight.
UNWORKABLE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "more GPUs than there are": (
        {"hardware": {"gpus": 99}, "train": {"global_batch_size": 99}},
        ["hardware.gpus = 99", "this machine shows", "Set it to that number or below"],
    ),
    "batch that processes cannot share": (
        {"train": {"global_batch_size": 5}, "hardware": {"gpus": "auto"}},
        ["train.global_batch_size = 5", "multiple of the 2 processes", "Set it to 4 or 6"],
    ),
}


@pytest.mark.parametrize(("edit", "message"), UNWORKABLE.values(), ids=UNWORKABLE)
def test_setting_that_cannot_work_with_this_model_stops_at_preflight(
    tokenized: Project, tmp_path: Path, edit: dict[str, Any], message: list[str]
) -> None:
    project = tokenized.copy(tmp_path / "project")
    project.edit(edit)
    assert_said(refusal(project, after=["preflight_run"]), *message)


@pytest.mark.parametrize(("edit", "message"), UNWORKABLE.values(), ids=UNWORKABLE)
def test_setting_that_cannot_work_on_this_machine_stops_at_the_description(
    fresh: Project, tmp_path: Path, edit: dict[str, Any], message: list[str]
) -> None:
    project = fresh.copy(tmp_path / "project")
    write_png(project)  # which would be refused, if it were read
    project.edit(edit)
    assert_said(refusal(project, after=["describe_model"]), *message)


def test_weights_that_are_text_stop_at_the_description(fresh: Project, tmp_path: Path) -> None:
    project = fresh.copy(tmp_path / "project")
    (project.root / "model" / "model.safetensors").write_text("no weights at all\n" * 50)
    seen = refusal(project, after=["describe_model"])
    assert_said(seen, "model/model.safetensors", "not a safetensors file", "Download it again")


def test_run_that_does_not_fit_stops_with_its_table_before_quantization(
    tokenized: Project, tmp_path: Path
) -> None:
    project = tokenized.copy(tmp_path / "project")
    project.edit({"hardware": {"host_memory_gib": 0.01}})
    seen = refusal(project, after=["preflight_run"])
    log = (project.root / "logs" / "preflight_run" / "demo.log").read_text()
    assert_said(seen, "run demo does not fit")
    for text in (seen, log):
        assert "does_not_fit" in text
        assert "adam_moments" in text


def test_no_run_starts_while_another_cannot_work(described: Project, tmp_path: Path) -> None:
    """Tokens and preflight of all runs come before the first quantization."""
    project = described.copy(tmp_path / "project")
    runs = {"demo": {}, "second": {"hardware": {"host_memory_gib": 0.01}}}
    project.write_settings(merge(project.settings, {"runs": runs}))
    done = project.snakemake("all")
    assert done.status == 1
    assert set(executed(done.output)) == {"tokenize_dataset", "preflight_run"}
