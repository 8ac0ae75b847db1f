"""What is to be recorded. Needs no torch, so that a kept recording is found without it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workflow.lib.planning.memory.setup import Setup
from workflow.lib.system.files import json_sha256

LIBRARY = Path(__file__).parents[1]
ENGINE = ("torch", "transformers", "peft", "bitsandbytes")  # besides this project's own code


@dataclass(frozen=True)
class Request:
    """A model and a plan."""

    config: Mapping[str, Any]
    """A config.json."""
    setup: Setup
    window_bytes: int | None
    """Offloaded activations that are on the device at a time; None where none are offloaded."""
    checked: bool = True
    """After the start-up checks, whose freed memory the allocator keeps."""

    def key(self) -> str:
        """Return a hash of all that decides the recording: this request, and the engine's code."""
        asked = [dict(self.config), asdict(self.setup), self.window_bytes, self.checked]
        return json_sha256([asked, [version(name) for name in ENGINE], _code_sha256()])


@cache
def _code_sha256() -> str:
    digest = sha256()
    for file in sorted(LIBRARY.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
