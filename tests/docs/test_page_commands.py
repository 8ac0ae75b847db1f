"""The commands of all pages run as a reader types them: page by page, each in one shell, in one
copy of the project.

Its settings are shrunk so that this takes minutes: a few training steps, few documents, two runs of
the sweep. The reader's own files are a copy of the demo's base and sixty chats."""

import re
import subprocess
import sys

import pytest

from tests.support.page_commands import blocks, pages, text_of
from tests.support.reader_clone import (
    ACTIVATE,
    add_files_of_the_reader,
    commands_of,
    copy_project,
    fork_stages,
    printed_by,
    run_commands,
    shrink,
)

# What the executed copy changes, and nothing else. CPU, so that it is the same on machines with
# GPUs; one process, as starting each of them takes longer than the steps (workflow/test_run.py
# trains in two).
SHRUNK = {
    "train": {"epochs": None, "max_steps": 3, "global_batch_size": 2},
    "hardware": {"gpus": 0, "cpu_processes": 1},
    "evaluate": {
        "max_documents": 8,
        "task_limit": 4,
        "samples": 1,
        "max_new_tokens": 4,
    },
}
# Of the demo, as the table of artifacts lists the merged model too.
MERGED = {"export": {"merged": True}}
SWEEP_RUNS = 2
PAGES = [name for name in pages() if any(block.is_run_here for block in blocks(name))]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A shrunk copy of the project, with the reader's files, in which the demo has been run."""
    if not ACTIVATE.exists():
        pytest.skip("this interpreter is in no virtual environment, so there is no .venv")
    folder = copy_project(tmp_path_factory.mktemp("project") / "clone")
    shrink(folder / "config.yaml", SHRUNK | MERGED, runs=1)
    for preset in (folder / "workflow" / "presets").glob("*-demo.yaml"):
        shrink(preset, SHRUNK, runs=SWEEP_RUNS if preset.stem == "sweep-demo" else None)
    add_files_of_the_reader(folder)
    run_commands(folder, "first", ["snakemake --cores all\n"])
    fork_stages(folder)
    return folder


@pytest.fixture(scope="module")
def ran(project):
    """Return a function that runs a page's commands, once, and returns what a command printed."""
    logs = {}

    def output(page, command=None):
        if page not in logs:
            logs[page] = run_commands(project, page, commands_of(page, project))
        log = logs[page]
        return log if command is None else printed_by(command, log)

    return output


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run_one_after_the_other(page, ran):
    assert ran(page)


# Parts of a run that these runs do not make: a server, or a model that llama.cpp knows.
NEED_MORE = ("convert_gguf", "check_served", "convert_merged/w4a16")
# Shared parts: of other settings, or of GPUs.
NOT_SHARED_HERE = {"results/extended/*-*", "results/sensitivities/*-*.json"}


def doc(name):
    return f"workflow/docs/{name}.md"


def test_quickstart_ends_with_an_answer(ran):
    printed = ran("README.md")
    assert "run mine fits: a process takes" in printed
    assert "run first\n  loss " in printed
    command = "python -m workflow.scripts.chat first --prompt 'How do I repair a piano?'"
    assert ran("README.md", command).strip()


def test_other_evaluation_settings_did_not_train_again(ran):
    log = ran(doc("report"))
    assert "rule evaluate_run:" in log
    assert "rule finetune:" not in log


def test_rewound_run_was_trained_again(ran):
    log = ran(doc("continue")).split("workflow.scripts.rewind demo 1")[1]
    assert "rule finetune:" in log
    assert "rule export_step:" in log


def test_mixture_is_made_of_the_dense_base(ran):
    assert "11,058,944, 8 experts" in ran(doc("choose-settings"))


def test_served_adapter_has_its_checksums_and_answers(ran):
    log = ran(doc("serve"))
    assert "adapter_model.safetensors: OK" in log
    assert "<|assistant|>" in log


def test_artifacts_of_the_page_are_there(project, ran):
    for page in PAGES:
        ran(page)
    listing = text_of(doc("artifacts")).split("| artifact | what it is |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \|", listing, re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row) if "/" in path]
    patterns = [re.sub(r"<\w+>", "*", path).rstrip("/") for path in paths]
    assert len(patterns) >= 12
    missing = {pattern for pattern in patterns if not list(project.glob(pattern))}
    others = {f"results/runs/*/{path}" for path in NEED_MORE}
    assert missing == others | NOT_SHARED_HERE, "which need more than these runs"


def test_make_train_is_the_command_of_the_pages(tmp_path):
    copy_project(tmp_path / "clone")
    shown = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "train"],
        cwd=tmp_path / "clone",
        capture_output=True,
        text=True,
        check=True,
    )
    last = shown.stdout.splitlines()[-1]
    assert last.startswith('PATH="')
    assert last.endswith(" snakemake --cores all train")
    assert "\nsnakemake --cores all train\n" in text_of(doc("quickstart"))


def test_drawn_graph_is_the_rule_graph(tmp_path):
    project = copy_project(tmp_path / "clone")
    shown = subprocess.run(
        [sys.executable, "-m", "snakemake", "--rulegraph", "mermaid-js", "--cores", "1"],
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = dict(re.findall(r"^\s*(id\d+)\[(\w+)\]", shown, re.MULTILINE))
    arrows = {
        (names[a], names[b]) for a, b in re.findall(r"^\s*(id\d+) --> (id\d+)", shown, re.MULTILINE)
    }
    # A target asks for the artifacts of every stage; only arrows between stages are drawn.
    arrows = {(stage, user) for stage, user in arrows if user not in ("all", "default")}
    drawn = text_of(doc("artifacts")).split("```mermaid\n")[1].split("```")[0]
    assert set(re.findall(r"(\w+) --> (\w+)", drawn)) == arrows
    assert len(arrows) > 10
