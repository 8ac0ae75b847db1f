"""Files against the SHA-256 that was recorded when they were written.

Records are `SHA256SUMS`, `files` in the tokens' manifest, and `source.json` of a download. A lost
bit changes neither size nor time, so every stage hashes its inputs (then cached). Each object, or
line, of a JSON artifact carries the SHA-256 of its content (`sha256`) itself."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from workflow.lib.system.errors import UserError
from workflow.lib.system.files import (
    SUMS,
    atomic_path,
    file_sha256,
    is_passing,
    read_checked_json,
    read_json,
    verified,
    with_checksum,
)

AHEAD = 1  # file that is hashed ahead: the page cache should hold both
LOADED = (".safetensors", ".json")  # a model folder's types that must be listed
NOT_AS_MADE = "does not have the SHA-256 that was recorded when it was made"


@dataclass(frozen=True)
class RecordedFile:
    """A file of a stage, and its recorded SHA-256; `name` is its path in the folder."""

    folder: Path
    name: str
    sha256: str

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def finding(self, digest: Callable[[Path], str] = file_sha256) -> str | None:
        """Return the file's fault, or None; digest: returns the SHA-256 of a path."""
        try:
            sha256 = digest(self.path)
        except OSError as error:
            if is_passing(error) or isinstance(error, PermissionError):
                raise
            return f"cannot be read ({error.strerror})"
        return None if sha256 == self.sha256 else NOT_AS_MADE


def damaged(folder: Path, name: str, finding: str) -> UserError:
    """Return the error of a damaged file in a folder of the workflow."""
    return UserError(
        f"{folder / name} is damaged: it {finding}. Delete the folder {folder} and repeat the "
        "command; the folder is made again."
    )


def listed_files(folder: Path) -> list[RecordedFile]:
    """Return the files in a folder's `SHA256SUMS`. Raises `UserError` if there is none, or if it
    lacks a file that would be loaded."""
    if not (folder / SUMS).is_file():
        raise UserError(
            f"{folder} holds no {SUMS}: it is no finished folder. Delete the folder {folder} and "
            "repeat the command; it is made again."
        )
    text = (folder / SUMS).read_text(encoding="utf-8", errors="backslashreplace")
    files = [_listed(folder, line) for line in text.removesuffix("\n").split("\n")]
    present = {
        p.name for p in folder.iterdir() if p.suffix in LOADED and not p.name.startswith(".")
    }
    if unlisted := present - {file.name for file in files}:
        raise damaged(folder, SUMS, f"does not list {min(unlisted)}")
    return files


def _listed(folder: Path, line: str) -> RecordedFile:
    sha256, _, name = line.partition("  ")
    if not name:
        raise damaged(folder, SUMS, f"has the line {line[:80]!r}")
    return RecordedFile(folder, name, sha256)


def downloaded_files(folder: Path) -> list[RecordedFile]:
    """Return the files in a download's record; none of a user's own folder. Raises `UserError` if
    the record is damaged."""
    if not (folder / HUB_RECORD).is_file():
        return []
    try:
        record = read_json(folder / HUB_RECORD)
        if not {"repo_id", "sha256"} & set(record):  # another file of this name
            return []
        record = verified(record)
        return [RecordedFile(folder, file["path"], file["sha256"]) for file in record["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / HUB_RECORD} cannot be read as the record of a download ({error!r}). If the "
            f"folder {folder} is a download, delete it and repeat the command; if it is your own, "
            "give this file another name."
        ) from None


def recorded_files(folder: Path) -> list[RecordedFile]:
    """Return the recorded files of a stage's or download's folder; none of a user's own."""
    return listed_files(folder) if (folder / SUMS).is_file() else downloaded_files(folder)


def without_weights(files: Iterable[RecordedFile]) -> list[RecordedFile]:
    """Return the files but the safetensors, which `CheckpointReader` hashes when it opens them."""
    return [file for file in files if not file.name.endswith(".safetensors")]


def largest_first(files: Iterable[RecordedFile]) -> list[RecordedFile]:
    """Return the files by size, so that every n-th of them is roughly a fair share."""

    def num_bytes(file: RecordedFile) -> int:
        return file.path.stat().st_size if file.path.is_file() else 0

    return sorted(files, key=num_bytes, reverse=True)


def findings(
    files: Sequence[RecordedFile],
    *,
    threads: int = 1,
    on_progress: Callable[[], None] = lambda: None,
) -> list[str | None]:
    """Return each file's fault, or None, hashed by `threads` threads."""
    with ThreadPoolExecutor(max_workers=threads) as pool:  # hashing frees the interpreter's lock
        digest = partial(file_sha256, on_progress=on_progress)
        return list(pool.map(lambda file: file.finding(digest), files))


def refuse_damaged(files: Sequence[RecordedFile], results: Sequence[str | None]) -> None:
    """Raise `UserError` with the first damaged file of every folder. results: of `findings`."""
    first: dict[Path, str] = {}
    for file, finding in zip(files, results, strict=True):
        if finding is not None:
            first.setdefault(file.folder, str(damaged(file.folder, file.name, finding)))
    if first:
        raise UserError(" ".join(first.values()))


def check_files(files: Sequence[RecordedFile], *, threads: int = 1) -> None:
    """Hash files, and raise `UserError` if one differs from its record. Several processes share the
    work by `work_sharing.check_recorded`."""
    refuse_damaged(files, findings(files, threads=threads))


class HashedAhead:
    """SHA-256 of files that are read in order: a thread hashes the next one while one is read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = [*paths]
        self._pool = ThreadPoolExecutor(max_workers=1 + AHEAD)  # threads start when needed
        self._hashes: dict[Path, Future[str]] = {}
        self._ended = False

    def sha256(self, path: Path) -> str:
        """Return a file's SHA-256, computed once; raises `OSError` if it cannot be read."""
        first = self._paths.index(path)
        for one in self._paths[first : first + 1 + AHEAD]:
            if one not in self._hashes:
                self._hashes[one] = self._pool.submit(
                    file_sha256, one, on_progress=self._stop_if_ended
                )
        return self._hashes[path].result()

    def end(self) -> None:
        """Hash no more."""
        self._ended = True
        self._pool.shutdown(cancel_futures=True)

    def _stop_if_ended(self) -> None:
        if self._ended:
            raise CancelledError


HUB_RECORD = "source.json"  # record of a dataset's download


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
