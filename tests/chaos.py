"""Faults at random moments over the whole workflow; the same plain command is repeated; nothing may be lost.

python -m tests.chaos --faults 50 --seed 1

Every round begins with a fresh small project (two processes on the CPU) and ends when the command has succeeded. Its
artifacts must then equal those of an undisturbed run: bytes of the adapter, tokens and base, numbers of the
evaluation, every line of the metrics. Prints a table of what was done, what was said, and what was trained again.
As root the results lie on a small tmpfs, which can be full or read-only.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.workflow_project import Project, make_project
from workflow.lib.checkpoint import saved_steps

STEPS = 40
TRAIN = {"max_steps": STEPS, "checkpoint_every_steps": 5, "grace_seconds": 60.0}
RESULTS_MB = 64
TIMEOUT_S = 900.0  # of one command, on a busy machine
MOST_REPEATS = 5
TIMES = {"tokens_per_s", "elapsed_s", "peak_bytes"}


class Victim:
    """A command in progress, and everything that it has started."""

    def __init__(self, project: Project, target: str) -> None:
        self.project = project
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read at the end
        self.process = subprocess.Popen(
            project.command(target), cwd=project.root, stdout=self.output, stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, process_group=0,
        )  # fmt: skip
        self._seen: dict[int, psutil.Process] = {}
        self.where = "start"  # the stage at which the fault hit

    def running(self) -> bool:
        return self.process.poll() is None

    def tree(self) -> list[psutil.Process]:
        """Everything started so far that is alive; it is remembered, so that orphans are found too."""
        for known in [*self._seen.values()]:
            try:
                below = known.children(recursive=True)
            except psutil.NoSuchProcess:
                continue
            self._seen |= {p.pid: p for p in below}
        if self.running():
            main = psutil.Process(self.process.pid)
            self._seen |= {main.pid: main}
            self._seen |= {p.pid: p for p in main.children(recursive=True)}
        return [p for p in self._seen.values() if p.is_running() and p.status() != "zombie"]

    def stage(self, name: str) -> list[psutil.Process]:
        """The processes of a stage: its launcher or only process first, then workers by rank."""
        found = []
        for process in self.tree():
            try:
                if f"workflow.scripts.{name}" in process.cmdline() and "bash" not in process.name():
                    found.append((int(process.environ().get("RANK", -1)), process))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def finish(self) -> tuple[int, str]:
        """Wait for the command's end; return its status and what it said. One that hangs is a failure of the round."""
        status = self.process.wait(timeout=TIMEOUT_S)
        self.output.seek(0)
        return status, self.output.read()


def checkpoint_folder(project: Project) -> Path | None:
    """Where this round's run has its checkpoints."""
    return next(iter(project.root.glob("results/checkpoints/*")), None)


def trained_steps(project: Project) -> int:
    """Steps in the metrics that are being written."""
    folder = checkpoint_folder(project)
    path = folder / "metrics.jsonl" if folder else None
    return path.read_text().count("\n") if path and path.exists() else 0


# Faults. Each returns False if its moment has passed: the stage was over before it could be hit.
Fault = Callable[[Victim, random.Random], bool]


def send(process: psutil.Process, number: int) -> bool:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def wait_for_training(victim: Victim, chance: random.Random) -> bool:
    """Wait until some more steps are trained, or, one time in five, only until the workers are there."""
    victim.where = "finetune"
    early = chance.random() < 0.2
    goal = trained_steps(victim.project) + chance.randint(1, 12)
    while victim.running():
        if early and len(victim.stage("finetune")) > 1:
            time.sleep(chance.uniform(0, 3))
            return victim.running()
        if not early and trained_steps(victim.project) >= min(goal, STEPS - 1):
            return bool(victim.stage("finetune"))
        time.sleep(0.05)
    return False


# What a stage leaves at its end.
LEAVES = {
    "tokenize_dataset": "results/tokens/*/manifest.json",
    "quantize_base": "results/base/*/quantization.json",
    "finetune": "results/runs/*/finetune/summary.json",
    "consolidate": "results/runs/*/consolidate/parity.json",
    "evaluate_run": "results/runs/*/evaluate_run/tuned.json",
    "render_report": "results/report/report.html",
}


def still_to_come(project: Project) -> list[str]:
    """Stages that have not left their last file yet."""
    return [stage for stage, pattern in LEAVES.items() if not [*project.root.glob(pattern)]]


def wait_for_any_stage(victim: Victim, chance: random.Random) -> bool:
    """Wait for a stage that is still to come, the next one most likely, and some moment of it."""
    coming = still_to_come(victim.project)
    if not coming:
        return False
    name = victim.where = chance.choice([coming[0], coming[0], *coming[:3]])
    while victim.running():
        if victim.stage(name):
            time.sleep(chance.uniform(0, 6))
            return victim.running()
        time.sleep(0.05)
    return False


def hit_training(number: int, *, launcher: bool) -> Fault:
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


def kill_snakemake(victim: Victim, chance: random.Random) -> bool:
    """Snakemake alone: what it has started goes on without it."""
    return wait_for_any_stage(victim, chance) and send(
        psutil.Process(victim.process.pid), signal.SIGKILL
    )


def kill_everything(victim: Victim, chance: random.Random) -> bool:
    """As a power cut does, except that the disk has all that was written."""
    if not wait_for_any_stage(victim, chance):
        return False
    for process in victim.tree():
        send(process, signal.SIGKILL)
    return True


def ctrl_c(victim: Victim, chance: random.Random) -> bool:
    """The terminal sends it to the whole group."""
    if not wait_for_any_stage(victim, chance):
        return False
    os.killpg(victim.process.pid, signal.SIGINT)
    return True


def terminate_snakemake(victim: Victim, chance: random.Random) -> bool:
    return wait_for_any_stage(victim, chance) and send(
        psutil.Process(victim.process.pid), signal.SIGTERM
    )


def full_disk(victim: Victim, chance: random.Random) -> bool:
    """Until the command has ended; then somebody frees the space."""
    if not wait_for_any_stage(victim, chance):
        return False
    with (victim.project.root / "results" / ".ballast").open("wb", buffering=0) as ballast:
        for size in (2**20, 2**12):
            try:
                while ballast.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return True


def damage(action: Callable[[Path, random.Random], None]) -> Fault:
    """Kill everything while it trains, then damage what is on the disk."""

    def fault(victim: Victim, chance: random.Random) -> bool:
        if not wait_for_training(victim, chance):
            return False
        for process in victim.tree():
            send(process, signal.SIGKILL)
        folder = checkpoint_folder(victim.project)
        if folder is not None:
            action(folder, chance)
        return True

    return fault


def truncate_checkpoint(folder: Path, chance: random.Random) -> None:
    for step in saved_steps(folder)[-1:]:
        files = sorted(p for p in (folder / f"step-{step:08d}").iterdir() if p.stat().st_size)
        path = chance.choice(files)
        os.truncate(path, chance.randrange(path.stat().st_size))


def flip_bit(folder: Path, chance: random.Random) -> None:
    for step in saved_steps(folder)[-1:]:
        files = sorted((folder / f"step-{step:08d}").glob("*.safetensors"))
        path = chance.choice(files)
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


def cut_records(folder: Path, chance: random.Random) -> None:
    """Metrics and history end anywhere, as after a power cut."""
    for name in ("metrics.jsonl", "history.jsonl"):
        path = folder / name
        if path.exists():
            os.truncate(path, chance.randrange(path.stat().st_size + 1))


def jump_clock(folder: Path, chance: random.Random) -> None:
    """Every file of the project is from another time, some from the future."""
    root = folder.parents[2]
    shift_s = chance.choice([-86_400.0, -3600.0, 3600.0, 86_400.0])
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            stat = path.stat()
            os.utime(path, (stat.st_atime + shift_s, stat.st_mtime + shift_s))


FAULTS: dict[str, Fault] = {
    "SIGKILL of a rank": hit_training(signal.SIGKILL, launcher=False),
    "SIGKILL of the launcher": hit_training(signal.SIGKILL, launcher=True),
    "SIGTERM to a rank": hit_training(signal.SIGTERM, launcher=False),
    "SIGTERM to the launcher": hit_training(signal.SIGTERM, launcher=True),
    "SIGUSR1 to the launcher": hit_training(signal.SIGUSR1, launcher=True),
    "SIGKILL of a stage or its shell": kill_job,
    "SIGKILL of Snakemake": kill_snakemake,
    "SIGKILL of everything": kill_everything,
    "Ctrl-C": ctrl_c,
    "SIGTERM to Snakemake": terminate_snakemake,
    "disk full": full_disk,
    "newest checkpoint truncated": damage(truncate_checkpoint),
    "newest checkpoint, one bit flipped": damage(flip_bit),
    "metrics and history cut": damage(cut_records),
    "clock jumped": damage(jump_clock),
}
IN_TRAINING = {n for n in FAULTS if n.startswith(("SIGKILL of a rank", "SIGKILL of the l", "SIGTERM to a r", "SIGTERM to the l", "SIGUSR1", "newest", "metrics", "clock"))}  # fmt: skip
READ_ONLY = "folder read-only at the start"


@dataclass(frozen=True)
class Row:
    """One fault: where it hit, how the command ended, and the steps that had to be trained again."""

    fault: str
    stage: str
    status: int
    said: str
    repeated_steps: int


def strike(project: Project, target: str, name: str, chance: random.Random) -> Row | None:
    """Start the command, let one fault happen, wait for the end. None: the command was faster than the fault."""
    if name == READ_ONLY:
        with read_only(project):
            victim = Victim(project, target)
            status, output = victim.finish()
        return Row(name, "start", status, last_words(output), 0)
    victim = Victim(project, target)
    hit = FAULTS[name](victim, chance)
    reached = trained_steps(project)
    status, output = victim.finish()
    (project.root / "results" / ".ballast").unlink(missing_ok=True)
    if not hit:
        return None
    folder = checkpoint_folder(project)
    newest = max(saved_steps(folder), default=0) if folder else 0
    return Row(name, victim.where, status, last_words(output), max(0, reached - newest))


def last_words(output: str) -> str:
    """The last line of what the user saw that is not Snakemake's frame; a traceback of ours is told as such."""
    ours = [line for line in output.splitlines() if line.startswith("logs/")]
    if "Traceback" in output:
        ours.append("TRACEBACK")
    lines = ours or [line for line in output.splitlines() if line.strip()]
    return lines[-1][:160].replace("|", "/") if lines else ""


def complete(project: Project, target: str) -> int:
    """Repeat the command until it succeeds; return how often it was needed."""
    for attempt in range(1, MOST_REPEATS + 1):
        status, output = Victim(project, target).finish()
        if status == 0:
            return attempt
    raise AssertionError(f"the command still fails after {MOST_REPEATS} repeats:\n{output}")


def facts(project: Project) -> dict[str, Any]:
    """What must not depend on any fault: contents by file, without times."""
    root = project.root / "results"
    exact = ["runs/*/consolidate/adapter/adapter_model.safetensors", "tokens/*/*.npy", "base/*/*.safetensors"]  # fmt: skip
    found: dict[str, Any] = {
        str(path.relative_to(root)): path.read_bytes()
        for pattern in exact
        for path in root.glob(pattern)
    }
    for path in root.glob("runs/*/finetune/metrics.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found["metrics"] = [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
    for path in root.glob("runs/*/evaluate_run/*.json"):
        found[path.name] = {k: v for k, v in json.loads(path.read_text()).items() if k != "provenance"}  # fmt: skip
    return found


def differences(project: Project, undisturbed: Project) -> list[str]:
    """Names of what differs between two finished projects; also what should not be there any more."""
    ours, theirs = facts(project), facts(undisturbed)
    differing = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    partial = [str(p) for p in project.root.glob("results/**/.*.partial")]
    return sorted(differing) + partial


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small tmpfs there, if this user may; tell whether."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={RESULTS_MB}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def read_only(project: Project) -> Iterator[None]:
    folder = str(project.root / "results")
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)


def storm(
    project: Project, target: str, *, names: list[str], most: int, chance: random.Random
) -> Iterator[Row]:
    """Let faults happen one after the other, while there is still something to be hit."""
    for _ in range(most):
        coming = still_to_come(project)
        possible = [n for n in names if n not in IN_TRAINING or "finetune" in coming]
        if not coming:
            return
        row = strike(project, target, chance.choice(possible), chance)
        if row is not None:
            yield row


def round_of(
    number: int, *, root: Path, undisturbed: Project, chance: random.Random, most: int
) -> list[Row]:
    """Run one round on a fresh project; raises `AssertionError` if anything differs at its end."""
    project = make_project(root / f"round-{number}", train=undisturbed.settings["train"])
    with small_disk(project.root / "results") as mounted:
        names = [*FAULTS, READ_ONLY] if mounted else [n for n in FAULTS if n != "disk full"]
        rows = []
        for row in storm(project, "all", names=names, most=most, chance=chance):
            rows.append(row)
            print(f"| {number} | {row.fault} | {row.stage} | {row.status} | {row.repeated_steps} | {row.said} |", flush=True)  # fmt: skip
        attempts = complete(project, "all")
        assert (found := differences(project, undisturbed)) == [], found
        resumed = project.json("finetune", "summary.json")["resumed_from_steps"]
        print(f"| {number} | none, command repeated {attempts}x | all | 0 | | equal; resumed from {resumed} |", flush=True)  # fmt: skip
    shutil.rmtree(project.root, ignore_errors=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=50, help="how many faults at least")
    parser.add_argument("--seed", type=int, default=0, help="of faults and moments")
    parser.add_argument("--round", type=int, default=6, help="faults of a round at most")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        root = Path(folder)
        undisturbed = make_project(root / "undisturbed", train=TRAIN)
        complete(undisturbed, "all")
        print(
            "| round | fault | stage | status | steps trained again | said |\n|---|---|---|---|---|---|"
        )
        done, number = 0, 0
        while done < args.faults:
            number += 1
            done += len(
                round_of(number, root=root, undisturbed=undisturbed, chance=chance, most=args.round)
            )
    print(f"{done} faults in {number} rounds: every artifact equals the undisturbed one")


if __name__ == "__main__":
    sys.exit(main())
