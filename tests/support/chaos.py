"""Faults at random moments of a training in progress, or in what it has left on the disk; after
each the same plain command is repeated, and nothing may be lost."""

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.workflow_project import STEPS, TIMEOUT_S, Project
from workflow.lib.artifacts.checkpoint_folder import saved_steps
from workflow.lib.system.files import read_checked_json

MOST_REPEATS = 5
TIMES = {"tokens_per_s", "elapsed_s", "peak_bytes", "sha256"}
# What a stage leaves at its end.
LEAVES = {
    "finetune": "results/runs/*/finetune/summary.json",
    "consolidate": "results/runs/*/consolidate/parity.json",
}


class Victim:
    """A command in progress, and everything that it has started."""

    def __init__(self, project: Project, target: str) -> None:
        self.project = project
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read at the end
        self.process = subprocess.Popen(
            project.command(target), cwd=project.root, stdout=self.output, stderr=subprocess.STDOUT,
            env=project.variables(), process_group=0,
        )  # fmt: skip
        self._seen = {}

    def running(self) -> bool:
        return self.process.poll() is None

    def tree(self) -> list[psutil.Process]:
        """Everything started so far that is alive; it is remembered, so that orphans are found
        too."""
        known = [*self._seen.values()] + [psutil.Process(self.process.pid)] * self.running()
        for process in known:
            with suppress(psutil.NoSuchProcess):  # it may end meanwhile
                self._seen |= {p.pid: p for p in (process, *process.children(recursive=True))}
        return [process for process in self._seen.values() if lives(process)]

    def stage(self, name: str) -> list[psutil.Process]:
        """The processes of a stage: its launcher or only process first, then workers by rank."""
        found = []
        modules = {f"workflow.scripts.{name}", f"workflow.scripts.{name}_worker"}
        for process in self.tree():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if modules & set(process.cmdline()) and "bash" not in process.name():
                    found.append((int(process.environ().get("RANK", -1)), process))
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def finish(self) -> str:
        """Wait for the command's end; return what it said."""
        self.process.wait(timeout=TIMEOUT_S)
        self.output.seek(0)
        return self.output.read()


def lives(process: psutil.Process) -> bool:
    """Tell whether it has not ended, which it may do at any moment."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def checkpoint_folder(project: Project) -> Path | None:
    return next(iter(project.root.glob("results/checkpoints/*")), None)


def trained_steps(project: Project) -> int:
    folder = checkpoint_folder(project)
    path = folder / "metrics.jsonl" if folder else None
    return path.read_text().count("\n") if path and path.exists() else 0


def still_to_come(project: Project) -> list[str]:
    """Stages that have not left their last file yet."""
    return [stage for stage, pattern in LEAVES.items() if not [*project.root.glob(pattern)]]


# Each returns False if its moment has passed: the stage was over before it could be hit.
Fault = Callable[[Victim, random.Random], bool]


def send(process: psutil.Process, number: int) -> bool:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def wait_for_training(victim: Victim, chance: random.Random) -> bool:
    """Wait until some more steps are trained, or, one time in five, only until the workers are
    there."""
    early = chance.random() < 0.2
    goal = min(trained_steps(victim.project) + chance.randint(1, 6), STEPS - 1)
    while victim.running():
        if early and len(victim.stage("finetune")) > 1:
            time.sleep(chance.uniform(0, 3))
            return victim.running()
        if not early and trained_steps(victim.project) >= goal:
            return bool(victim.stage("finetune"))
        time.sleep(0.05)
    return False


def wait_for_any_stage(victim: Victim, chance: random.Random) -> bool:
    """Wait for a stage that is still to come, the next one most likely, and some moment of it."""
    coming = still_to_come(victim.project)
    if not coming:
        return False
    name = chance.choice([coming[0], coming[0], *coming])
    while victim.running():
        if victim.stage(name):
            time.sleep(chance.uniform(0, 6))
            return victim.running()
        time.sleep(0.05)
    return False


def hit_training(number: int, *, launcher: bool) -> Fault:
    """A signal to the launcher, which is torchrun, or to one of its workers."""

    def fault(victim: Victim, chance: random.Random) -> bool:
        if not wait_for_training(victim, chance):
            return False
        processes = victim.stage("finetune")
        chosen = processes[:1] if launcher else processes[1:]
        return bool(chosen) and send(chance.choice(chosen), number)

    return fault


def kill_job(victim: Victim, chance: random.Random) -> bool:
    """The process of a stage, whichever it is, or the shell around it."""
    if not wait_for_any_stage(victim, chance):
        return False
    shells = [p for p in victim.tree() if p.name() == "bash"]
    jobs = [p for name in LEAVES for p in victim.stage(name)[:1]]
    return bool(shells + jobs) and send(chance.choice(shells + jobs), signal.SIGKILL)


def kill_everything(victim: Victim, chance: random.Random) -> bool:
    """As a power cut does, except that the disk has all that was written."""
    if not wait_for_any_stage(victim, chance):
        return False
    for process in victim.tree():
        send(process, signal.SIGKILL)
    return True


def flip_bit(folder: Path, chance: random.Random) -> None:
    """In the newest checkpoint."""
    for step in saved_steps(folder)[-1:]:
        path = chance.choice(sorted((folder / f"step-{step:08d}").glob("*.safetensors")))
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


def cut_records(folder: Path, chance: random.Random) -> None:
    """Metrics and history end anywhere, as after a power cut."""
    for path in (folder / "metrics.jsonl", folder / "history.jsonl"):
        if path.exists():
            os.truncate(path, chance.randrange(path.stat().st_size + 1))


TO_TORCHRUN = "SIGKILL of torchrun"
IN_TRAINING: dict[str, Fault] = {
    "SIGKILL of a rank": hit_training(signal.SIGKILL, launcher=False),
    TO_TORCHRUN: hit_training(signal.SIGKILL, launcher=True),
    "SIGTERM to a rank": hit_training(signal.SIGTERM, launcher=False),
    "SIGUSR1 to torchrun": hit_training(signal.SIGUSR1, launcher=True),
}
FAULTS = IN_TRAINING | {
    "SIGKILL of a stage or its shell": kill_job,
    "SIGKILL of everything": kill_everything,
}
BETWEEN_COMMANDS = {
    "newest checkpoint, one bit flipped": flip_bit,
    "metrics and history cut": cut_records,
}


def storm(
    project: Project, target: str, *, most: int, chance: random.Random
) -> Iterator[tuple[str, str]]:
    """Let faults happen one after the other, while there is still something to be hit; yield each,
    with all that the command said.

    A fault hits a command in progress; where that was training, another one damages what it has
    left, before the command is repeated. The rarest come first."""
    tried, left = Counter[str](), most
    while left > 0 and (coming := still_to_come(project)):
        training = "finetune" in coming
        name = rarest([n for n in FAULTS if n not in IN_TRAINING or training], tried, chance)
        victim = Victim(project, target)
        hit = FAULTS[name](victim, chance)
        said = victim.finish()
        left -= 1
        if not hit:  # the command was faster
            continue
        tried[name] += 1
        yield name, said
        folder = checkpoint_folder(project)
        if training and left and folder and saved_steps(folder):
            name = rarest([*BETWEEN_COMMANDS], tried, chance)
            BETWEEN_COMMANDS[name](folder, chance)
            left -= 1
            tried[name] += 1
            yield name, ""


def rarest(names: list[str], tried: Counter[str], chance: random.Random) -> str:
    least = min(tried[name] for name in names)
    return chance.choice([name for name in names if tried[name] == least])


def complete(project: Project, target: str) -> None:
    """Repeat the command until it succeeds."""
    for _ in range(MOST_REPEATS):
        done = project.snakemake(target)
        if done.status == 0:
            return
    raise AssertionError(f"the command still fails after {MOST_REPEATS} repeats:\n{done.output}")


def facts(project: Project) -> dict[str, Any]:
    """What must not depend on any fault: contents by file, without times."""
    root = project.root / "results"
    exact = [
        "runs/*/consolidate/adapter/adapter_model.safetensors",
        "tokens/*/*.npy",
        "base/*/*.safetensors",
    ]
    found = {
        str(path.relative_to(root)): path.read_bytes()
        for pattern in exact
        for path in root.glob(pattern)
    }
    for path in root.glob("runs/*/finetune/metrics.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found["metrics"] = [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
    for path in root.glob("runs/*/evaluate_run/*.json"):
        found[path.name] = {k: v for k, v in read_checked_json(path).items() if k != "provenance"}
    return found


def differences(project: Project, undisturbed: Project) -> list[str]:
    """Names of what differs between two finished projects; also what should not be there any
    more."""
    ours, theirs = facts(project), facts(undisturbed)
    differing = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    partial = [str(p) for p in project.root.glob("results/**/.*.partial")]
    return sorted(differing) + partial
