"""Faults and flipped bits over all artifacts of a finished run, and how each was met.

python -m tests.support.faults --faults 100 --flips 100 --seed 1

A small project is run to its end once. Each fault gets a copy of it: a file is deleted, cut or
emptied, a part of it reads as zeros, or one bit is flipped, in each file in turn and without a
change of its time; then the stage that reads the file is run. Or the stage is killed at a random
moment, or its disk is full (a small tmpfs) or read-only, as far as this user may mount one. What
happens is counted:

    refused   one message that names the file or its folder, and no traceback
    healed    the stage ends well, and all results are those of the undisturbed run
    silent    the stage ends well, and a result differs, or a damaged file was taken
    broken    a traceback, or a message that names nothing of it
    lost      after the message was obeyed and the command repeated, results differ or are not made

The message is obeyed once for each kind of fault and folder, since that is the same each time. Left
out are what no stage reads: the report, the card, lists of rows for people, the live view.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.chaos import MOST_REPEATS, differences
from tests.support.workflow_project import Finished, Project, kill_all, make_project

TRAIN = {"max_steps": 6, "checkpoint_every_steps": 2}
# The stage that reads the files of a pattern; the first pattern counts.
READERS = {
    "models/*/*": "preflight_run",
    "base/*/*": "evaluate_run",
    "tokens/*/manifest.json": "evaluate_run",
    "tokens/*/train.*": "finetune",
    "tokens/*/heldout.*": "evaluate_run",
    "checkpoints/*/step-*/*": "finetune",
    "evaluations/*/*": "evaluate_run",
    "runs/demo/preflight_run/*": "render_report",
    "runs/demo/finetune/metrics.jsonl": "render_report",
    "runs/demo/finetune/summary.json": "render_report",
    "runs/demo/finetune/**/*": "consolidate",
    "runs/demo/consolidate/parity.json": "render_report",
    "runs/demo/consolidate/adapter/README.md": None,  # for people
    "runs/demo/consolidate/**/*": "evaluate_run",
    "runs/demo/evaluate_run/*": "render_report",
}
STAGES = sorted({stage for stage in READERS.values() if stage})
TOLD = re.compile(r"[Dd]elete (?:the folder )?(results/[\w./-]+?)[ .,;]")
OUTCOMES = ("refused", "healed", "silent", "broken", "lost")
SPARE_BYTES = 2**24  # of a small disk, until it is filled


@dataclass(frozen=True)
class Fault:
    """What is done: its kind, to which file, and which stage then runs."""

    kind: str
    file: str
    stage: str
    seed: int


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(1, max(2, len(content)))]


def zeroed(content: bytes, chance: random.Random) -> bytes:
    """A page that a disk has lost, or the whole of a smaller file."""
    start = chance.randrange(max(1, len(content) - 4096))
    return content[:start] + bytes(min(4096, len(content) - start)) + content[start + 4096 :]


def flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


AT_REST: dict[str, Callable[[bytes, random.Random], bytes] | None] = {
    "deleted": None,
    "cut": cut,
    "emptied": lambda content, chance: b"",
    "a page reads as zeros": zeroed,
}
FLIP = "one bit flipped"
KILLED, FULL, READ_ONLY = "killed", "disk full", "disk read-only"


def artifacts(project: Project) -> dict[str, str]:
    root, found = project.root / "results", dict[str, str | None]()
    for pattern, stage in READERS.items():
        for path in sorted(root.glob(pattern)):
            if path.is_file() and not path.name.startswith(".") and path.stat().st_size:
                found.setdefault(str(path.relative_to(project.root)), stage)
    return {name: stage for name, stage in found.items() if stage}


def planned(project: Project, *, faults: int, flips: int, seed: int) -> list[Fault]:
    """Return the faults: of a quarter the stage is hit at work, of the others a file at rest."""
    read, chance = artifacts(project), random.Random(seed)
    at_work = [KILLED, FULL, KILLED, READ_ONLY] if may_mount() else [KILLED]
    plan = []
    for kind, names in ((FLIP, flips), (None, faults - faults // 4)):
        files = sorted(read)
        chance.shuffle(files)
        for number in range(names):
            file = files[number % len(files)]
            kinds = list(AT_REST)
            plan.append(Fault(kind or kinds[number % len(kinds)], file, read[file], number))
    for number in range(faults // 4):
        stage = STAGES[number % len(STAGES)]
        plan.append(Fault(at_work[number % len(at_work)], "", stage, number))
    return plan


def may_mount() -> bool:
    """Tell whether this user may mount a small disk."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
        if subprocess.run(mount, capture_output=True).returncode:
            return False
        subprocess.run(["umount", folder], check=True)
    return True


def harm(path: Path, fault: Fault) -> None:
    """Damage a file, and keep its time, as a disk does."""
    before, change = path.stat(), flipped if fault.kind == FLIP else AT_REST[fault.kind]
    if change is None:
        path.unlink()
        return
    path.write_bytes(change(path.read_bytes(), random.Random(fault.seed)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@contextmanager
def disk(project: Project, fault: Fault) -> Iterator[None]:
    folder, copy = project.root / "results", project.root / "copy"
    folder.rename(copy)
    folder.mkdir()
    size = sum(-(-p.stat().st_size // 4096) * 4096 + 4096 for p in copy.rglob("*")) + SPARE_BYTES
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        shutil.copytree(copy, folder, dirs_exist_ok=True, symlinks=True)
        if fault.kind == READ_ONLY:
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield
    finally:
        if fault.kind == READ_ONLY:
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        (folder / "ballast").unlink(missing_ok=True)
        shutil.rmtree(copy)
        shutil.copytree(folder, copy, symlinks=True)
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()
        copy.rename(folder)


def left(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def run_stage(project: Project, fault: Fault) -> Finished:
    """Run the stage that reads the damaged file, or the stage that is hit."""
    command = ["--forcerun", fault.stage, "--until", fault.stage, "--", "all"]
    if fault.kind not in (KILLED, FULL):
        return project.snakemake(*command)
    process = project.start(*command, forks_stages=True)
    time.sleep(random.Random(fault.seed).uniform(0.5, 8.0))
    if fault.kind == KILLED:
        kill_all(process)
        return Finished(-9, "")
    ballast = project.root / "results" / "ballast"
    ballast.write_bytes(bytes(max(0, left(ballast.parent) - 4096)))
    output, _ = process.communicate()
    return Finished(process.returncode, output)


def met(project: Project, undisturbed: Project, fault: Fault) -> tuple[str, str, str]:
    """Let a fault happen; return how it was met, what was said last, and all that was said."""
    if fault.file:
        harm(project.root / fault.file, fault)
        done = run_stage(project, fault)
    elif fault.kind == KILLED:
        done = run_stage(project, fault)
    else:
        with disk(project, fault):
            done = run_stage(project, fault)
    said = last_words(done.output)
    if done.status == 0:
        found = differences(project, undisturbed)
        return ("silent" if found else "healed"), "; ".join(found), done.output
    if fault.kind == KILLED:
        return "refused", said, done.output
    names = {Path(fault.file).name, str(Path(fault.file).parent), "disk"} - {""}
    told = "Traceback" not in done.output and any(name in done.output for name in names)
    return ("refused" if told else "broken"), said if told else done.output[-3000:], done.output


def last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if "results/" in line or "disk" in line]
    return lines[-1][:300] if lines else ""


def repaired(project: Project, undisturbed: Project, output: str) -> list[str]:
    """Do what the message asks for and repeat the command; return what then differs."""
    for _ in range(MOST_REPEATS):
        for match in TOLD.finditer(output):
            remove(project.root / match[1])
        done = project.snakemake("all")
        if done.status == 0:
            return differences(project, undisturbed)
        output = done.output
    return [output[-2000:]]


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> None:
    """Let all faults happen, some at a time; fail if one was silent, broken or lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=100, help="files lost, kills, full disks")
    parser.add_argument("--flips", type=int, default=100, help="flipped bits")
    parser.add_argument("--seed", type=int, default=1, help="of files, places and moments")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--folder", type=Path, help="of the undisturbed run; default: a new one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        folder = args.folder or Path(temporary) / "undisturbed"
        undisturbed = Project(folder) if folder.exists() else make_project(folder, train=TRAIN)
        undisturbed.run("all")
        plan = planned(undisturbed, faults=args.faults, flips=args.flips, seed=args.seed)
        obeyed = set[tuple[str, str]]()

        def one(numbered: tuple[int, Fault]) -> tuple[str, str]:
            number, fault = numbered
            project = undisturbed.copy(Path(temporary) / str(number))
            outcome, said, output = met(project, undisturbed, fault)
            way = (fault.kind, str(Path(fault.file).parent))
            if outcome == "refused" and (not fault.file or way not in obeyed):
                obeyed.add(way)
                if found := repaired(project, undisturbed, output):
                    outcome, said = "lost", "; ".join(found)
            print(
                f"| {fault.kind} | {fault.file} | {fault.stage} | {outcome} | {said} |", flush=True
            )
            shutil.rmtree(project.root)
            return fault.kind, outcome

        with ThreadPoolExecutor(args.jobs) as pool:
            outcomes = list(pool.map(one, enumerate(plan)))
    print(summary(outcomes))
    sys.exit(any(outcome not in ("refused", "healed") for _, outcome in outcomes))


def summary(outcomes: Sequence[tuple[str, str]]) -> str:
    lines = [f"| fault | times | {' | '.join(OUTCOMES)} |", "|---" * (2 + len(OUTCOMES)) + "|"]
    for kind in dict.fromkeys(kind for kind, _ in outcomes):
        counts = Counter(outcome for of_kind, outcome in outcomes if of_kind == kind)
        cells = " | ".join(str(counts[outcome]) for outcome in OUTCOMES)
        lines.append(f"| {kind} | {counts.total()} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
