"""A stage as a command, in a fork of the process that has imported its packages.

done = forked_stage("evaluate_run", config={}, log="log")"""

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.preloaded_python import SETTLED, preloaded_python
from workflow.lib.system.files import write_checked_json

ROOT = Path(__file__).resolve().parents[2]


def command_line(options: Mapping[str, Any]) -> list[str]:
    """Return options as words, those that are None left out; for settings a file of them."""
    words = []
    for name, value in options.items():
        if value is not None:
            word = settings_file(value) if isinstance(value, dict) else value
            words += [f"--{name.replace('_', '-')}", str(word)]
    return words


def settings_file(settings: Mapping[str, Any]) -> Path:
    """Return a file of a stage's settings."""
    text = json.dumps(settings)
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = Path(tempfile.gettempdir()) / f"settings-{digest}.json"
    if not path.exists():
        write_checked_json(path, dict(settings))
    return path


def forked_stage(
    stage: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    killed_at: str | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; return exit status, standard output and standard error.

    environment: variables that replace this process' own; killed_at: name of a file, at whose
    rename it is killed."""
    by = ["tests.support.killed_at", killed_at] if killed_at else []
    words = [*by, f"workflow.scripts.{stage}", *arguments, *command_line(options)]
    return subprocess.run(
        [preloaded_python(), "-m", *words],
        cwd=ROOT,
        env=dict(os.environ if environment is None else environment) | SETTLED,
        capture_output=True,
        text=True,
    )


def refusal_of(done: subprocess.CompletedProcess[str], *, output: Path) -> str:
    """Expect that a stage ended by a message and left no output; return what it said."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()
    return done.stderr
