"""JSON artifacts: each object, or line, carries the SHA-256 of its content (`sha256`), and is read
only if it agrees. `SHA256SUMS` lists other packages' files instead."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workflow.lib.system.checksums import damaged
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import (
    atomic_path,
    is_passing,
    read_checked_json,
    verified,
    with_checksum,
)


def read_artifact(path: Path) -> dict[str, Any]:
    """Return the content of a JSON artifact in its stage's folder. Raises `UserError` if it is
    missing or was changed."""
    try:
        return read_checked_json(path)
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        if is_passing(error) or isinstance(error, PermissionError):
            raise
        raise damaged(path.parent, path.name, f"cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(path.parent, path.name, fault_text(error)) from None


def _missing(path: Path) -> UserError:
    return UserError(
        f"{path}: there is no such file. Repeat the command, which makes it; if it comes to this "
        f"again, delete the folder {path.parent} and repeat the command."
    )


def fault_text(error: Exception) -> str:
    """Return the fault of a changed file, as the end of a sentence."""
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 ({error.reason})"
    if isinstance(error, json.JSONDecodeError):
        return f"is not valid JSON ({error})"
    return str(error) or type(error).__name__


def checked_line(row: Mapping[str, object]) -> str:
    """Return a row as a JSON line with its `sha256`."""
    return json.dumps(with_checksum(row), ensure_ascii=False, allow_nan=False) + "\n"


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write an object a line, atomically, each with its `sha256`."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(map(checked_line, rows))


def row_of(line: str) -> dict[str, Any]:
    """Return the row of a line, without its `sha256`; raises as `files.verified`."""
    return verified(json.loads(line))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of `write_lines`, perhaps none. Raises `UserError` naming the first
    changed line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise _missing(path) from None
    rows = []
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line:  # after the last line's end
            break
        try:
            rows.append(row_of(line.decode()))
        except (ValueError, TypeError, RecursionError) as error:
            finding = f"{fault_text(error)} (line {number})"
            raise damaged(path.parent, path.name, finding) from None
    return rows
