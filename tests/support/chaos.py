"""Faults at random moments over the whole workflow; the same plain command is repeated; nothing may
be lost.

python -m tests.support.chaos --faults 50 --seed 1

Every round begins with a fresh small project (two processes on the CPU) and ends when the command
has succeeded. A fault hits a command in progress; where that was training, another one damages what
it has left on the disk, before the command is repeated. The artifacts at the end must then equal
those of an undisturbed run: bytes of the adapter, tokens and base, numbers of the evaluation, every
line of the metrics. Nothing is mended between two commands but what the message asked for: a folder
deleted that it names as damaged, files from the future touched by the command that it gives. Prints
every fault as it happens, with what was said and the steps that had to be trained again."""

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.chaos_faults import (
    BETWEEN_COMMANDS,
    FAULTS,
    IN_TRAINING,
    STEPS,
    Victim,
    checkpoint_folder,
    still_to_come,
    trained_steps,
)
from tests.support.workflow_project import Project, make_project
from workflow.lib.system.files import read_checked_json
from workflow.lib.training.checkpoint import saved_steps

TRAIN = {
    "max_steps": STEPS,
    "checkpoint_every_steps": 5,
    "grace_seconds": 60.0,
    "hang_seconds": 20.0,
}
MOST_REPEATS = 5
TIMES = {"tokens_per_s", "elapsed_s", "peak_bytes", "sha256"}
LEAVES_ORPHANS = {"SIGKILL of Snakemake"}  # which go on writing: nobody harms their files meanwhile
# What the workflow says after the clock was put back.
MEND = re.compile(r"This mends it: (find -L .* -exec touch \{\} \+)")
DAMAGED = re.compile(r"(results/(?:tokens|base)/[\w.-]+)\S* .*?[Dd]elete the folder")


@dataclass(frozen=True)
class Row:
    """One fault: where it hit, what was said, and the steps that had to be trained again."""

    fault: str
    stage: str
    said: str
    repeated_steps: int


def strike(project: Project, *, target: str, name: str, chance: random.Random) -> Row | None:
    """Start the command, let one fault happen, wait for the end. None: the command was faster than
    the fault."""
    victim = Victim(project, target)
    hit = FAULTS[name](victim, chance)
    reached = trained_steps(project)
    output = victim.finish()
    do_as_told(project, output)
    if "Traceback" in output:
        print(output, file=sys.stderr, flush=True)
    if not hit:
        return None
    folder = checkpoint_folder(project)
    newest = max(saved_steps(folder), default=0) if folder else 0
    return Row(name, victim.where, last_words(output), max(0, reached - newest))


def harm(project: Project, *, name: str, chance: random.Random) -> Row | None:
    """Damage what an interrupted training has left. None: it has left no checkpoint."""
    folder = checkpoint_folder(project)
    saved = saved_steps(folder) if folder else []
    if folder is None or not saved:
        return None
    BETWEEN_COMMANDS[name](folder, chance)
    lost = saved[-1] - (saved[-2] if len(saved) > 1 else 0) if "checkpoint" in name else 0
    return Row(name, "between two commands", "", lost)


def last_words(output: str) -> str:
    """The last line of what the user saw that is not Snakemake's frame; a traceback of ours is told
    as such."""
    ours = [line for line in output.splitlines() if line.startswith("logs/")]
    if "Traceback" in output:
        ours.append("TRACEBACK")
    frame = ("  File", "    ", "Complete log")  # Snakemake's
    lines = ours or [
        line for line in output.splitlines() if line.strip() and not line.startswith(frame)
    ]
    return lines[-1][:200].replace("|", "/") if lines else ""


def do_as_told(project: Project, output: str) -> None:
    """Delete the folders that the command named as damaged; run the command that it gave for files
    from the future."""
    for folder in {match[1] for match in DAMAGED.finditer(output)}:
        shutil.rmtree(project.root / folder, ignore_errors=True)
    for match in MEND.finditer(output):
        subprocess.run(match[1], shell=True, cwd=project.root, check=True)


def complete(project: Project, target: str) -> int:
    """Repeat the command until it succeeds; return how often it was needed."""
    for attempt in range(1, MOST_REPEATS + 1):
        done = project.snakemake(target)
        if done.status == 0:
            return attempt
        do_as_told(project, done.output)
    raise AssertionError(f"the command still fails after {MOST_REPEATS} repeats:\n{done.output}")


def facts(project: Project) -> dict[str, Any]:
    """What must not depend on any fault: contents by file, without times."""
    root = project.root / "results"
    exact = [
        "runs/*/consolidate/adapter/adapter_model.safetensors",
        "tokens/*/*.npy",
        "base/*/*.safetensors",
    ]
    found: dict[str, Any] = {
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


def storm(
    project: Project,
    target: str,
    *,
    names: Sequence[str],
    most: int,
    chance: random.Random,
    tried: Counter[str],
) -> Iterator[Row]:
    """Let faults happen one after the other, while there is still something to be hit.

    tried: how often each kind has happened so far; the rarest come first."""
    left = most
    while left > 0 and (coming := still_to_come(project)):
        training = "finetune" in coming
        possible = [n for n in names if n in FAULTS and (n not in IN_TRAINING or training)]
        row = strike(project, target=target, name=rarest(possible, tried, chance), chance=chance)
        left -= 1
        if row is None:
            continue
        tried[row.fault] += 1
        yield row
        harms = [n for n in names if n in BETWEEN_COMMANDS]
        if row.fault in LEAVES_ORPHANS or not (harms and training and left):
            continue
        row = harm(project, name=rarest(harms, tried, chance), chance=chance)
        if row is not None:
            left -= 1
            tried[row.fault] += 1
            yield row


def rarest(names: Sequence[str], tried: Counter[str], chance: random.Random) -> str:
    least = min(tried[name] for name in names)
    return chance.choice([name for name in names if tried[name] == least])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=50, help="how many faults at least")
    parser.add_argument("--seed", type=int, default=0, help="of faults and moments")
    parser.add_argument("--round", type=int, default=10, help="faults of a round at most")
    args = parser.parse_args()
    # A shell that starts this in the background has it ignored, also by all that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chance, tried = random.Random(args.seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        undisturbed = make_project(Path(folder) / "undisturbed", train=TRAIN)
        complete(undisturbed, "all")
        while tried.total() < args.faults:
            project = make_project(Path(folder) / "round", train=TRAIN)
            names = [*FAULTS, *BETWEEN_COMMANDS]
            for row in storm(
                project, "all", names=names, most=args.round, chance=chance, tried=tried
            ):
                cells = (row.fault, row.stage, row.repeated_steps, row.said)
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
            complete(project, "all")
            assert (found := differences(project, undisturbed)) == [], found
            shutil.rmtree(project.root)
    print(f"{tried.total()} faults: every artifact equals the undisturbed one")


if __name__ == "__main__":
    main()
