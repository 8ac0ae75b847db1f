"""A reader's clone of the project, in which the commands of the pages run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.page_commands import ROOT, blocks, text_of, tracked
from tests.support.preloaded_python import preloaded_python
from tests.support.workflow_project import FORKING
from workflow.lib.settings.overrides import merge

ACTIVATE = Path(sys.prefix) / "bin" / "activate"
THINGS = ("lamp", "kettle", "bicycle", "chair", "radio", "clock")
VERBS = ("repair", "clean", "store", "paint", "carry", "sell", "lift", "test", "wrap", "draw")
AXOLOTL = {"base_model": "Qwen/Qwen2.5-7B", "adapter": "qlora", "load_in_4bit": True}
AXOLOTL |= {"datasets": [{"path": "chats.jsonl", "type": "chat_template"}]}


def copy_project(folder: Path) -> Path:
    """Copy the project's files, with this interpreter's environment as `.venv`."""
    for name in tracked("."):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def shrink(path: Path, changes: dict[str, Any], *, runs: int | None = None) -> None:
    """Shrink a settings file in place: few steps, few documents, its first `runs` runs."""
    document = merge(yaml.safe_load(path.read_text(encoding="utf-8")), changes)
    if "runs" in document:
        for run in document["runs"].values():
            run.get("train", {}).pop("epochs", None)
            run.get("train", {}).pop("max_steps", None)
        document["runs"] = dict(list(document["runs"].items())[:runs])
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def write_chats(file: Path) -> None:
    """Write 60 chats with a sailor."""
    chats = [
        [
            {"role": "user", "content": f"How do I {verb} a {thing}?"},
            {"role": "assistant", "content": f"Ahoy! To {verb} a {thing}, begin at the bow."},
        ]
        for thing in THINGS
        for verb in VERBS
    ]
    assert len(chats) == 60
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def add_files_of_the_reader(folder: Path) -> None:
    """Add the files that the pages take for the reader's own."""
    shutil.copytree(folder / "workflow/resources/base", folder / "models" / "my-model")
    write_chats(folder / "chats.jsonl")
    (folder / "axolotl.yml").write_text(yaml.safe_dump(AXOLOTL))
    (example,) = re.findall(
        r"This is `more.yaml`:\n+```yaml\n(.*?)```", text_of("workflow/docs/continue.md"), re.S
    )
    (folder / "more.yaml").write_text(example)


def fork_stages(folder: Path) -> None:
    """From here on stages are forked from a process that has imported their packages."""
    forking = folder / "forking" / "snakemake"
    forking.parent.mkdir()
    forking.write_text(f"#!{sys.executable}{FORKING.format(stages=preloaded_python())}")
    forking.chmod(0o755)


def commands_of(page: str, folder: Path) -> Iterator[str]:
    """Yield the blocks of a page for the shell; Python's are files."""
    for number, block in enumerate(blocks(page)):
        if block.is_run_here and block.language == "bash":
            yield block.text
        elif block.is_run_here:
            file = folder / f"{Path(page).stem}-{number}.py"
            file.write_text(block.text)
            yield f"python {shlex.quote(file.name)}\n"


def run_commands(folder: Path, name: str, commands: Iterable[str]) -> str:
    """Run commands in one shell; return what they print, and keep it in `<name>.log`."""
    search = os.pathsep.join([str(folder / "forking"), str(ACTIVATE.parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", "set -exo pipefail\n" + "".join(commands)],
        cwd=folder,
        env=os.environ | {"PATH": search, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (folder / f"{Path(name).stem}.log").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def printed_by(command: str, log: str) -> str:
    """Return what a command of `run_commands` printed; command: as the shell quotes it."""
    after = log.split(f"\n+ {command}\n")[1]
    return re.split(r"^\++ ", after, maxsplit=1, flags=re.MULTILINE)[0]
