"""README.md is true: its commands run, its paths exist, its graph is the workflow's, its settings
load.

All commands are executed one after the other in one shell, as a reader types them, in a copy of the
project whose
settings are shrunk so that it takes minutes: a few training steps, few documents, two runs of the
sweep. A block that is not executed says why in an HTML comment right before it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.support.preloaded_python import preloaded_python
from tests.support.workflow_project import FORKING
from workflow.lib.settings.config import load_config
from workflow.lib.settings.overrides import merge

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ACTIVATE = Path(sys.prefix) / "bin" / "activate"
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\n$")
# Reasons that a command cannot be run by a test; a block names one of them.
REASONS = (
    "needs a cluster",
    "installs packages, and `make test` would run itself",
    "downloads a gated model and needs a GPU",
    "its files are yours",
    "these run this test too",
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
# Where commands are told to users.
TOLD = ("README.md", "workflow/*.md", "workflow/*.py", "workflow/*.smk", "workflow/report")
# From this command on stages are forked from a process that has imported their packages. By then
# every stage has started as a user starts it.
FORKED_FROM = "snakemake --cores all --configfile workflow/presets/sweep-demo.yaml"


class Block(NamedTuple):
    """A fenced block: its language, its text, and why it is not run (None if it is)."""

    language: str
    text: str
    not_run: str | None


def blocks():
    for fence in re.finditer(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL):
        reason = NOT_RUN.search(README[: fence.start()])
        yield Block(fence[1], fence[2], reason[1] if reason else None)


def shrink(path, changes, *, runs):
    """Shrink a settings file in place: few steps, few documents, its first `runs` runs."""
    document = merge(yaml.safe_load(path.read_text(encoding="utf-8")), changes)
    for run in document["runs"].values():
        run.get("train", {}).pop("epochs", None)
    document["runs"] = dict(list(document["runs"].items())[:runs])
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def tracked(*folders):
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *folders]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


def copy_project(folder):
    for name in tracked("."):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def forked(commands, folder):
    forking = folder / "forking" / "snakemake"
    forking.parent.mkdir(exist_ok=True)
    forking.write_text(f"#!{sys.executable}{FORKING.format(stages=preloaded_python())}")
    forking.chmod(0o755)
    search = f"export PATH={shlex.quote(str(forking.parent))}:$PATH\n"
    return commands.replace(FORKED_FROM, search + FORKED_FROM)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A shrunk copy of the project in which all commands and the Python example have run."""
    if not ACTIVATE.exists():
        pytest.skip(
            "this interpreter is not in a virtual environment, so there is no .venv to activate"
        )
    folder = copy_project(tmp_path_factory.mktemp("project") / "clone")
    shrink(folder / "config.yaml", SHRUNK | MERGED, runs=1)
    shrink(folder / "workflow" / "presets" / "sweep-demo.yaml", SHRUNK, runs=SWEEP_RUNS)
    shrink(folder / "workflow" / "presets" / "mixture-demo.yaml", SHRUNK, runs=1)
    (folder / "example.py").write_text("".join(b.text for b in blocks() if b.language == "python"))
    commands = [
        "python example.py\n" if block.language == "python" else forked(block.text, folder)
        for block in blocks()
        if block.language in ("bash", "python") and block.not_run is None
    ]
    done = subprocess.run(
        ["bash", "-c", "set -exo pipefail\n" + "".join(commands)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (folder / "commands.log").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    return folder


def output_of(project, command):
    """Return what a command of the README printed; the shell wrote `+ <command>` before it."""
    after = (project / "commands.log").read_text().split(f"\n+ {command}\n")[1]
    return re.split(r"^\++ ", after, maxsplit=1, flags=re.MULTILINE)[0]


def test_commands_of_the_readme_run_one_after_the_other(project):
    assert "rule finetune:" in output_of(project, "snakemake --cores all train")
    assert "rule render_report:" in output_of(project, "snakemake --cores all")
    assert "11,058,944, 8 experts" in output_of(project, "python -m workflow.scripts.upcycle_base")
    assert "adapter_model.safetensors: OK" in output_of(project, "sha256sum --check SHA256SUMS")


def test_what_is_made_is_not_made_again(project):
    assert "Nothing to be done" in output_of(project, "snakemake --cores all --dry-run")
    printed = output_of(project, "snakemake --cores all preflight")
    assert "memory of each process" in printed
    assert "rule preflight_run:" not in printed


def test_artifacts_of_the_readme_are_there_after_its_commands(project):
    table = page("artifacts").split("| artifact | what it is |")[1].split("\n\n")[0]
    paths = [p for row in re.findall(r"^\| (.+?) \|", table, re.MULTILINE) for p in code(row)]
    patterns = [re.sub(r"<\w+>", "*", path).rstrip("/") for path in paths if "/" in path]
    assert len(patterns) >= 12
    missing = [pattern for pattern in patterns if not list(project.glob(pattern))]
    others = ["export_step/*", "convert_gguf", "check_served"]
    made_if_asked = ["results/extended/*-*", "results/scores/*-*"]
    others = [*made_if_asked, *(f"results/runs/*/{path}" for path in others)]
    assert {*missing} == {*others}, "which need more than a run"


def test_other_evaluation_settings_did_not_train_again(project):
    (command,) = [line for line in README.splitlines() if "--config evaluate" in line]
    output = output_of(project, command.replace("evaluate='{", "'evaluate={"))
    assert re.search(r"rule evaluate_run:", output)
    assert "rule finetune:" not in output


def test_every_block_that_is_not_run_gives_a_known_reason_right_before_it():
    reasons = {block.not_run for block in blocks()} - {None}
    assert reasons == set(REASONS)
    assert README.count("<!-- not run:") == sum(block.not_run is not None for block in blocks())


def test_make_train_is_the_command_that_the_readme_says(tmp_path):
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
    assert "\nsnakemake --cores all train\n" in README


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
    # The target asks for the artifacts of every stage; only arrows between stages are drawn.
    arrows = {(stage, user) for stage, user in arrows if user != "all"}
    drawn = page("artifacts").split("```mermaid\n")[1].split("```")[0]
    assert set(re.findall(r"(\w+) --> (\w+)", drawn)) == arrows
    assert len(arrows) > 10


def test_every_command_gives_the_number_of_cores_without_which_snakemake_stops():
    rules = "".join((ROOT / name).read_text("utf-8") for name in tracked("Snakefile", "*.smk"))
    targets = "|".join(re.findall(r"^rule (\w+):", rules, re.MULTILINE))
    command = re.compile(rf"snakemake (?:{targets})\b")
    told = {name: (ROOT / name).read_text("utf-8") for name in tracked(*TOLD)}
    assert {n: command.findall(text) for n, text in told.items() if command.search(text)} == {}


def test_settings_of_the_readme_load():
    documents = [yaml.safe_load(block.text) for block in blocks() if block.language == "yaml"]
    assert documents
    for document in documents:
        load_config(document)


def code(text):
    """Return the spans of code in a line of Markdown."""
    return re.findall(r"`([^`]+)`", text)


def page(name):
    return (ROOT / "workflow" / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_every_package_of_the_library_is_described_in_the_order_of_imports():
    table = page("architecture").split("\n| package | holds |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)[.`]", table, re.MULTILINE)
    listed = list(dict.fromkeys(rows))  # of some packages, their parts stand in rows of their own
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = document["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if "workflow.scripts" in c.get("layers", ()))
    highest_first = [set(re.findall(r"workflow\.lib\.(\w+)", layer)) for layer in layers[1:]]
    levels = {name: -level for level, names in enumerate(highest_first) for name in names}
    assert set(listed) == set(levels)
    assert [levels[name] for name in listed] == sorted(levels.values())


def test_every_page_of_the_documents_stands_in_the_readme_or_in_a_page_that_does():
    pages = {path.name for path in (ROOT / "workflow" / "docs").glob("*.md")}
    linked = set(re.findall(r"\]\(workflow/docs/([\w.-]+\.md)", README))
    linked |= {
        link for name in linked for link in re.findall(r"\]\(([\w.-]+\.md)", page(name[:-3]))
    }
    assert sorted(pages - linked) == []


def test_links_of_every_document_lead_to_files():
    wrong = []
    for document in (Path(name) for name in tracked(".") if name.endswith(".md")):
        text = (ROOT / document).read_text(encoding="utf-8")
        plain = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
        targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", plain)
        local = [target for target in targets if "://" not in target]
        wrong += [(document, t) for t in local if not (ROOT / document.parent / t).exists()]
    assert wrong == []
