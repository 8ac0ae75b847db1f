"""Finished measurements, kept by everything that they depend on.

A part of an evaluation (held-out loss, samples, one task) of one subject lies in
`<folder>/<subject>/<part>-<key>.json`; both names are short hashes of content: of the subject's
checksums, and of settings, data and package versions. Runs may share the folder; it may be deleted.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow.lib.system.artifact_files import said
from workflow.lib.system.checksums import RecordedFile
from workflow.lib.system.files import provenance, read_checked_json, short_hash, write_checked_json

logger = logging.getLogger("workflow")

FORMAT_VERSION = 2  # raised whenever a part is measured or written otherwise than before
# Named in checksums, but without influence on any number: they tell when and how a folder was made.
UNMEASURED = ("README.md", "quantization.json")


def content_key(*models: Sequence[RecordedFile]) -> str:
    """Return a short hash of the content of models, from the recorded SHA-256 of their files. The
    files must have been checked against it (`work_sharing.check_recorded`)."""
    return short_hash(
        [[f"{f.sha256}  {f.name}" for f in files if f.name not in UNMEASURED] for files in models]
    )


@dataclass(frozen=True)
class Archive:
    folder: Path

    def find(self, subject: str, part: str, facts: Mapping[str, Any]) -> Any | None:
        """Return what was measured on `subject` under `facts`; None if nothing sound is there."""
        path = self._path(subject, part, facts)
        if not path.is_file():
            return None
        try:
            return read_checked_json(path)["value"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            _note_damage(path, said(error))
            return None

    def keep(self, subject: str, part: str, facts: Mapping[str, Any], value: Any) -> None:
        """Write one measurement (JSON, finite numbers), atomically."""
        entry = {"part": part, "value": value, "provenance": provenance()}
        write_checked_json(self._path(subject, part, facts), entry)

    def _path(self, subject: str, part: str, facts: Mapping[str, Any]) -> Path:
        readable = re.sub(r"[^\w.-]", "_", part)
        key = short_hash([FORMAT_VERSION, part, facts])
        return self.folder / subject / f"{readable}-{key}.json"


def _note_damage(path: Path, finding: str) -> None:
    logger.warning("%s is damaged (%s): it is ignored, and measured again", path, finding)
