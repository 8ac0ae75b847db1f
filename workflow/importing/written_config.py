"""The end of a tool that writes a config: preflight's verdict, and the commands that follow."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from workflow.lib.system.errors import UserError, setting_error

logger = logging.getLogger("workflow")


def check_is_new(output: Path) -> None:
    """Raise `UserError` if the file is there."""
    if output.exists():
        raise setting_error("--output", str(output), "it is there already", "Name another file")


def finish(document: dict[str, Any], output: Path, *, gpus: str | None, rows: int | None) -> None:
    """Ask preflight whether a written config fits the GPUs, and log the next commands. rows: of
    the packed training data. Raises `UserError` if it does not fit."""
    if gpus is not None:
        words = preflight_words(document, gpus=gpus) + (["--rows", str(rows)] if rows else [])
        words += ["--brief", "--run", output.stem]
        command = [sys.executable, "-m", "workflow.scripts.preflight_run", *words]
        if subprocess.run(command, check=False).returncode != 0:
            raise UserError(
                f"{output} is written, but preflight has an objection, see above. Change the "
                "config as it says."
            )
    commands = [f"  snakemake --cores all{target} --configfile {output}" for target in TARGETS]
    logger.info("%s", "\n".join([f"{output} is written. Next:", *commands]))


TARGETS = (" preview", "")


def preflight_words(document: dict[str, Any], *, gpus: str) -> list[str]:
    """Return the arguments of preflight for a config."""
    words = ["--model", document["model"]["source"], "--gpus", gpus]
    for section, settings in document.items():
        for key, value in settings.items():
            if section != "runs" and (section, key) not in (("model", "source"), ("model", "name")):
                words += ["--set", f"{section}.{key}={json.dumps(value)}"]
    return words
