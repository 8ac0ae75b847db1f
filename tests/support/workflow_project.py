"""A temporary project of the real Snakefile: a random model, a few rows, and Snakemake as a user
starts it.

project = make_project(tmp_path)
project.edit({"lora": {"r": 8}})
plan = project.plan("all")                  # a dry run: {"finetune": [Job(...)], ...}
done = project.snakemake("train")           # exit status and everything the user would see"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support.preloaded_python import SETTLED, preloaded_python
from workflow.lib.settings.overrides import merge

REPOSITORY = Path(__file__).resolve().parents[2]
TARGETS = ("all", "default", "tokenize", "preflight", "train", "evaluate", "report")
ADAPTER = "adapter/adapter_model.safetensors"
TIMEOUT_S = 1800.0  # of one command, on a busy machine

# Small on purpose: two processes, six steps. The random model needs a high rate to move at all.
SETTINGS: dict[str, Any] = {
    "model": {"name": "tiny", "source": "model"},
    "data": {
        "name": "qa",
        "train": "data/train.jsonl",
        "heldout": "data/heldout.jsonl",
        "seq_len": 32,
    },
    "lora": {"r": 4, "alpha": 8},
    "train": {
        "epochs": None,
        "max_steps": 6,
        "global_batch_size": 4,
        "learning_rate": 1e-2,
        "checkpoint_every_steps": 3,
    },
    "hardware": {"gpus": 0, "cpu_processes": 2},
    "evaluate": {
        "tasks": [],
        "tasks_dir": None,
        "samples": 2,
        "max_new_tokens": 5,
    },
    "runs": {"demo": {}},
}

# `python -m snakemake` whose stages are run by another interpreter.
FORKING = """
import sys
from snakemake.cli import main
sys.executable = {stages!r}
main()
"""

# Long enough to be interrupted between two checkpoints.
STEPS = 41
LONG = {"max_steps": STEPS, "checkpoint_every_steps": 4, "grace_seconds": 20.0}


@dataclass(frozen=True)
class Job:
    """A job that a dry run plans: its wildcards, why Snakemake would run it, and its cores."""

    rule: str
    wildcards: dict[str, str]
    reason: str
    threads: int


@dataclass(frozen=True)
class Finished:
    """A finished Snakemake: exit status, and standard output and error together."""

    status: int
    output: str

    @property
    def nothing_to_do(self) -> bool:
        """Whether it said that all targets are up to date."""
        return "Nothing to be done" in self.output


@dataclass(frozen=True)
class Project:
    """A working directory with `config.yaml`, run by the Snakefile of `repository`."""

    root: Path
    repository: Path = REPOSITORY
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        return yaml.safe_load((self.root / "config.yaml").read_text())

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Replace `config.yaml`; the order of keys is kept."""
        (self.root / "config.yaml").write_text(yaml.safe_dump(dict(settings), sort_keys=False))

    def edit(self, changes: Mapping[str, Any]) -> None:
        """Lay `changes` over `config.yaml`, as a user edits it."""
        self.write_settings(merge(self.settings, changes))

    def command(self, *arguments: str) -> list[str]:
        """Return the command line; arguments are targets and options."""
        profile = self.repository / "workflow" / "profiles" / "default"
        places = ["--snakefile", str(self.repository / "Snakefile"), "--directory", str(self.root)]
        options = ["--workflow-profile", str(profile), "--cores", "2", "--nocolor"]
        return [sys.executable, "-m", "snakemake", *places, *options, *arguments]

    def variables(self) -> dict[str, str]:
        """Return the environment that Snakemake runs in."""
        return os.environ | SETTLED | self.environment

    def start(self, *arguments: str, forks_stages: bool = False) -> subprocess.Popen[str]:
        """Start Snakemake in a process group of its own, as a shell does.

        forks_stages: have stages forked from a process that has imported their packages."""
        command = self.command(*arguments)
        if forks_stages:
            command[1:3] = ["-c", FORKING.format(stages=preloaded_python())]
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=self.variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def snakemake(self, *arguments: str) -> Finished:
        """Run Snakemake to its end; it and its jobs are forked from a process that has imported
        their packages."""
        done = subprocess.run(
            [preloaded_python(), *self.command(*arguments)[1:]],
            cwd=self.root,
            env=self.variables(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Finished(done.returncode, done.stdout)

    def run(self, *arguments: str) -> Finished:
        """Run Snakemake and expect success."""
        done = self.snakemake(*arguments)
        assert done.status == 0, done.output
        return done

    def plan(self, *arguments: str) -> dict[str, list[Job]]:
        """Return what a dry run would do, by rule; the targets themselves are left out."""
        done = self.run("--dry-run", *arguments)
        plan = {}
        for job in parse_jobs(done.output):
            plan.setdefault(job.rule, []).append(job)
        assert bool(plan) != done.nothing_to_do, done.output
        return plan

    def planned(self, *arguments: str) -> dict[str, int]:
        """Return how many jobs of each rule a dry run would start."""
        return {rule: len(jobs) for rule, jobs in self.plan(*arguments).items()}

    def copy(self, root: Path, *, repository: Path | None = None) -> "Project":
        """Copy everything, modification times and Snakemake's records included."""
        shutil.copytree(self.root, root, symlinks=True, dirs_exist_ok=True)
        return Project(root, repository or self.repository, self.environment)

    def folder(self, stage: str, run: str = "demo") -> Path:
        return self.root / "results" / "runs" / run / stage

    def json(self, stage: str, name: str, run: str = "demo") -> dict[str, Any]:
        return json.loads((self.folder(stage, run) / name).read_text())


def parse_jobs(output: str) -> list[Job]:
    """Return the jobs that a dry run prints, targets left out."""
    blocks = re.findall(r"^(?:local)?rule (\w+):\n((?:    .*\n)+)", output, flags=re.MULTILINE)
    jobs = []
    for rule, body in blocks:
        fields = dict(re.findall(r"^    (\w+): (.*)$", body, flags=re.MULTILINE))
        wildcards = dict(re.findall(r"(\w+)=([^,]+)", fields.get("wildcards", "")))
        if rule not in TARGETS:
            jobs.append(Job(rule, wildcards, fields["reason"], int(fields.get("threads", 1))))
    return jobs


def executed(output: str) -> Counter[str]:
    """Count the jobs that a real run started, by rule, targets left out."""
    rules = re.findall(r"^(?:local)?rule (\w+):$", output, flags=re.MULTILINE)
    return Counter(rule for rule in rules if rule not in TARGETS)


def adapter_bytes(project: Project) -> bytes:
    """Return the exported adapter of a finished run."""
    return (project.folder("consolidate") / ADAPTER).read_bytes()


def run_folders(project: Project, *, num_steps: int) -> list[Path]:
    plans = project.root.glob("results/checkpoints/*/plan.json")
    return [
        path.parent
        for path in plans
        if json.loads(path.read_text())["plan"]["num_steps"] == num_steps
    ]


def kill_all(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """SIGKILL a process and everything below it, as a power cut does; return what was below."""
    below = psutil.Process(process.pid).children(recursive=True)
    for one in [psutil.Process(process.pid), *below]:
        one.send_signal(signal.SIGKILL)
    process.communicate()
    return below


def make_project(root: Path, **changes: Any) -> Project:
    """Write a tiny model with its tokenizer, 60 training and 12 held-out rows, and
    `config.yaml`."""
    # They import torch, which not every session of tests needs.
    from tests.support.models import tiny_llama
    from tests.support.tiny import VOCAB_SIZE, tiny_tokenizer

    tiny_llama(root / "model", vocab_size=VOCAB_SIZE)
    tiny_tokenizer(root / "model")
    write_rows(root / "data" / "train.jsonl", first=0, rows=60)
    write_rows(root / "data" / "heldout.jsonl", first=1000, rows=12)
    project = Project(root)
    project.write_settings(merge(SETTINGS, changes))
    return project


def copy_of_repository(target: Path) -> Path:
    """Copy what a run needs: Snakefile, workflow (without its data) and environments."""
    leave_out = shutil.ignore_patterns("__pycache__", "resources", "presets")
    shutil.copytree(REPOSITORY / "workflow", target / "workflow", ignore=leave_out)
    shutil.copytree(REPOSITORY / "envs", target / "envs")
    shutil.copy2(REPOSITORY / "Snakefile", target / "Snakefile")
    return target


def qa_rows(*, first: int, rows: int) -> list[dict[str, str]]:
    return [
        {"prompt": f"What is {n} and {n % 7}?", "completion": f"It is {n + n % 7}."}
        for n in range(first, first + rows)
    ]


def write_rows(path: Path, *, first: int, rows: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) + "\n" for row in qa_rows(first=first, rows=rows))
    path.write_text("".join(lines), encoding="utf-8")
