"""Faults and flipped bits over all artifacts of a finished run, and how each was met.

python -m tests.support.faults --faults 100 --flips 100 --seed 1

A small project is run to its end once. Each fault gets a copy of it: a file is deleted, cut or
emptied, a part of it reads as zeros, or one bit is flipped, in each file in turn and without a
change of its time; then the stage that reads the file is run. What hits stages at work is
`tests.support.chaos`. What happens is counted:

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
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support.chaos import MOST_REPEATS, differences
from tests.support.workflow_project import Project, make_project

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
TOLD = re.compile(r"[Dd]elete (?:the folder )?(results/[\w./-]+?)[ .,;]")
OUTCOMES = ("refused", "healed", "silent", "broken", "lost")


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


def artifacts(project: Project) -> dict[str, str]:
    root, found = project.root / "results", dict[str, str | None]()
    for pattern, stage in READERS.items():
        for path in sorted(root.glob(pattern)):
            if path.is_file() and not path.name.startswith(".") and path.stat().st_size:
                found.setdefault(str(path.relative_to(project.root)), stage)
    return {name: stage for name, stage in found.items() if stage}


def planned(project: Project, *, faults: int, flips: int, seed: int) -> list[Fault]:
    read, chance = artifacts(project), random.Random(seed)
    kinds, plan = list(AT_REST), []
    for kind, count in ((FLIP, flips), (None, faults)):
        files = sorted(read)
        chance.shuffle(files)
        for number in range(count):
            file = files[number % len(files)]
            plan.append(Fault(kind or kinds[number % len(kinds)], file, read[file], number))
    return plan


def harm(path: Path, fault: Fault) -> None:
    """Damage a file, and keep its time, as a disk does."""
    before, change = path.stat(), flipped if fault.kind == FLIP else AT_REST[fault.kind]
    if change is None:
        path.unlink()
        return
    path.write_bytes(change(path.read_bytes(), random.Random(fault.seed)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def met(project: Project, undisturbed: Project, fault: Fault) -> tuple[str, str, str]:
    """Let a fault happen; return how it was met, what was said last, and all that was said."""
    harm(project.root / fault.file, fault)
    done = project.snakemake("--forcerun", fault.stage, "--until", fault.stage, "--", "all")
    said = last_words(done.output)
    if done.status == 0:
        found = differences(project, undisturbed)
        return ("silent" if found else "healed"), "; ".join(found), done.output
    names = {Path(fault.file).name, str(Path(fault.file).parent)}
    told = "Traceback" not in done.output and any(name in done.output for name in names)
    return ("refused" if told else "broken"), said if told else done.output[-3000:], done.output


def last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if "results/" in line]
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
    parser.add_argument("--faults", type=int, default=100, help="files lost")
    parser.add_argument("--flips", type=int, default=100, help="flipped bits")
    parser.add_argument("--seed", type=int, default=1, help="of files and places")
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
            if outcome == "refused" and way not in obeyed:
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
