"""What a file that is to be uploaded says of this machine: paths, found before anybody else sees
them.

Settings in JSON are read: a value that is a path out of the folder is named with its key, wherever
it leads. Every other text is searched for the beginnings of this machine's own folders, whole,
whatever its size; of weights the head, which may hold metadata.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workflow.lib.settings.evaluate import HUB_REPO

BASE = "base_model_name_or_path"  # of adapter_config.json
# Absolute paths of two parts and more (a token may be called /think), upward ones, and addresses of
# files; a value with line breaks or braces is a text.
OUTSIDE = re.compile(
    r"(?:file:/+|~[^/\s]*/|(?:\.{1,2}/)*\.\./|[A-Za-z]:[\\/]|\\\\|/[^/\s]+/)[^\n{}<>|]*"
)
WEIGHTS = (".safetensors", ".gguf")
VOCABULARIES = ("tokenizer.json", "vocab.json")  # a token may be called anything
CHUNK = 2**20  # bytes that are searched at once


def named_paths(path: Path) -> Iterator[str]:
    """Yield what a file says of this machine, in words."""
    if path.suffix == ".json" and path.name not in VOCABULARIES:
        for key, value in _settings(path):
            if key == BASE and not re.match(HUB_REPO, value):
                yield f"{value} as the base model ({key}), which is no id of the hub"
            elif OUTSIDE.fullmatch(value):
                yield f"{value} ({key}), a path of this machine"
    for folder in _found(path, private_folders()):
        yield f"{folder}, a folder of this machine"


def private_folders() -> list[str]:
    """Return how paths of this machine begin: of the home folder, of this one, of temporary
    files."""
    folders = {str(Path.home()), str(Path.cwd()), tempfile.gettempdir()}
    return sorted(f"{folder.rstrip(os.sep)}{os.sep}" for folder in folders if folder != os.sep)


def _settings(path: Path) -> Iterator[tuple[str, str]]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    yield from _texts(content)


def _texts(content: Any) -> Iterator[tuple[str, str]]:
    parts = content.values() if isinstance(content, dict) else content
    if not isinstance(content, dict | list):
        return
    for key, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, str):
            yield str(key), value
    for part in parts:
        yield from _texts(part)


def _found(path: Path, folders: list[str]) -> Iterator[str]:
    """Yield those of the folders that a file names, as they are or as JSON writes them."""
    forms = {form.encode(): x for x in folders for form in (x, json.dumps(x)[1:-1])}
    overlap = max((len(form) for form in forms), default=1) - 1
    found: set[str] = set()
    before = b""
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            text = before + part
            found |= {folder for form, folder in forms.items() if form in text}
            before = text[-overlap:] if overlap else b""
            if path.suffix in WEIGHTS:
                break
    yield from sorted(found)
