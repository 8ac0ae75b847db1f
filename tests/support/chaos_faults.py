"""The faults of `tests.support.chaos`: each waits for a random moment of a command in progress, or
harms what lies on the disk between two commands."""

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.workflow_project import Project
from workflow.lib.training.checkpoint import saved_steps

STEPS = 40
TIMEOUT_S = 1800.0  # of one command, on a busy machine

# What a stage leaves at its end.
LEAVES = {
    "tokenize_dataset": "results/tokens/*/manifest.json",
    "quantize_base": "results/base/*/quantization.json",
    "finetune": "results/runs/*/finetune/summary.json",
    "consolidate": "results/runs/*/consolidate/parity.json",
    "evaluate_run": "results/runs/*/evaluate_run/tuned.json",
    "render_report": "results/report/report.html",
}


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
        """Everything started so far that is alive; it is remembered, so that orphans are found
        too."""
        for known in [*self._seen.values()]:
            try:
                below = known.children(recursive=True)
            except psutil.NoSuchProcess:
                continue
            self._seen |= {p.pid: p for p in below}
        if self.running():
            main = psutil.Process(self.process.pid)
            self._seen |= {main.pid: main}
            with suppress(psutil.NoSuchProcess):  # it may end meanwhile
                self._seen |= {p.pid: p for p in main.children(recursive=True)}
        return [process for process in self._seen.values() if lives(process)]

    def stage(self, name: str) -> list[psutil.Process]:
        """The processes of a stage: its launcher or only process first, then workers by rank."""
        found = []
        modules = {f"workflow.scripts.{name}", f"workflow.scripts.{name}_worker"}
        for process in self.tree():
            try:
                if modules & set(process.cmdline()) and "bash" not in process.name():
                    found.append((int(process.environ().get("RANK", -1)), process))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def finish(self) -> str:
        """Wait for the command's end; return what it said. One that hangs is a failure of the
        round."""
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
    """Where this round's run has its checkpoints."""
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


def kill_tree(victim: Victim) -> None:
    for process in victim.tree():
        send(process, signal.SIGKILL)


def wait_for_steps(victim: Victim, chance: random.Random) -> bool:
    victim.where = "finetune"
    goal = min(trained_steps(victim.project) + chance.randint(1, 6), STEPS - 1)
    while victim.running():
        if trained_steps(victim.project) >= goal:
            return bool(victim.stage("finetune"))
        time.sleep(0.05)
    return False


def wait_for_training(victim: Victim, chance: random.Random) -> bool:
    """Wait until some more steps are trained, or, one time in five, only until the workers are
    there."""
    if chance.random() >= 0.2:
        return wait_for_steps(victim, chance)
    victim.where = "finetune"
    while victim.running():
        if len(victim.stage("finetune")) > 1:
            time.sleep(chance.uniform(0, 3))
            return victim.running()
        time.sleep(0.05)
    return False


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
    """A signal to the launcher, which is torchrun, or to one of its workers."""

    def fault(victim: Victim, chance: random.Random) -> bool:
        if not wait_for_training(victim, chance):
            return False
        processes = victim.stage("finetune")
        chosen = processes[:1] if launcher else processes[1:]
        return bool(chosen) and send(chance.choice(chosen), number)

    return fault


def stop_rank(victim: Victim, chance: random.Random) -> bool:
    """It does not die, it does not run: the others wait for it."""
    workers = victim.stage("finetune")[1:] if wait_for_steps(victim, chance) else []
    return bool(workers) and send(chance.choice(workers), signal.SIGSTOP)


def starve_rank(victim: Victim, chance: random.Random) -> bool:
    """From now on it gets no memory beyond what it has."""
    workers = victim.stage("finetune")[1:] if wait_for_steps(victim, chance) else []
    if not workers:
        return False
    worker = chance.choice(workers)
    try:
        worker.rlimit(psutil.RLIMIT_AS, (2**20, 2**20))
    except psutil.NoSuchProcess:
        return False
    return True


def cut_tokens(victim: Victim, chance: random.Random) -> bool:
    """A file that is being read ends anywhere from now on."""
    if not wait_for_steps(victim, chance):
        return False
    path = chance.choice(sorted(victim.project.root.glob("results/tokens/*/train.*.npy")))
    os.truncate(path, chance.randrange(path.stat().st_size))
    return True


def kill_in_write(victim: Victim, chance: random.Random) -> bool:
    """Everything dies between two writes of one checkpoint."""
    if not wait_for_steps(victim, chance):
        return False
    folder, tree = checkpoint_folder(victim.project), victim.tree()
    while victim.running() and folder is not None:
        if any(folder.glob(".step-*.partial")):
            for process in reversed(tree):
                send(process, signal.SIGKILL)
            kill_tree(victim)
            return True
    return False


def kill_job(victim: Victim, chance: random.Random) -> bool:
    """The process of a stage, whichever it is, or the shell around it."""
    if not wait_for_any_stage(victim, chance):
        return False
    shells = [p for p in victim.tree() if p.name() == "bash"]
    jobs = [p for name in LEAVES for p in victim.stage(name)[:1]]
    return bool(shells + jobs) and send(chance.choice(shells + jobs), signal.SIGKILL)


def hit_snakemake(number: int) -> Fault:
    """Snakemake alone; of a kill, what it has started hears nothing and goes on."""

    def fault(victim: Victim, chance: random.Random) -> bool:
        return wait_for_any_stage(victim, chance) and send(
            psutil.Process(victim.process.pid), number
        )

    return fault


def kill_everything(victim: Victim, chance: random.Random) -> bool:
    """As a power cut does, except that the disk has all that was written."""
    if not wait_for_any_stage(victim, chance):
        return False
    kill_tree(victim)
    return True


def ctrl_c(victim: Victim, chance: random.Random) -> bool:
    """The terminal sends it to the whole group."""
    if not wait_for_any_stage(victim, chance):
        return False
    os.killpg(victim.process.pid, signal.SIGINT)
    return True


# Does harm to what an interrupted training has left; gets its folder of checkpoints.
Damage = Callable[[Path, random.Random], None]


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


IN_TRAINING: dict[str, Fault] = {
    "SIGKILL of a rank": hit_training(signal.SIGKILL, launcher=False),
    "SIGKILL of torchrun": hit_training(signal.SIGKILL, launcher=True),
    "SIGTERM to a rank": hit_training(signal.SIGTERM, launcher=False),
    "SIGTERM to torchrun": hit_training(signal.SIGTERM, launcher=True),
    "SIGUSR1 to torchrun": hit_training(signal.SIGUSR1, launcher=True),
    "SIGSTOP of a rank": stop_rank,
    "no more memory for a rank": starve_rank,
    "tokens truncated while they are read": cut_tokens,
    "power cut while a checkpoint is written": kill_in_write,
}
BETWEEN_COMMANDS: dict[str, Damage] = {
    "newest checkpoint truncated": truncate_checkpoint,
    "newest checkpoint, one bit flipped": flip_bit,
    "metrics and history cut": cut_records,
    "clock jumped": jump_clock,
}
IN_ANY_STAGE: dict[str, Fault] = {
    "SIGKILL of a stage or its shell": kill_job,
    "SIGKILL of Snakemake": hit_snakemake(signal.SIGKILL),
    "SIGTERM to Snakemake": hit_snakemake(signal.SIGTERM),
    "SIGKILL of everything": kill_everything,
    "Ctrl-C": ctrl_c,
}
FAULTS = IN_TRAINING | IN_ANY_STAGE
