"""A stage as a command, in a fork of the process that has imported its packages.

done = forked_stage("evaluate_run", "--config", "{}", "--log", "log")"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.preloaded_python import SETTLED, preloaded_python

ROOT = Path(__file__).resolve().parents[2]


def forked_stage(
    stage: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; return exit status, standard output and standard error.

    environment: variables that replace this process' own."""
    return subprocess.run(
        [preloaded_python(), "-m", f"workflow.scripts.{stage}", *arguments],
        cwd=ROOT,
        env=dict(os.environ if environment is None else environment) | SETTLED,
        capture_output=True,
        text=True,
    )
