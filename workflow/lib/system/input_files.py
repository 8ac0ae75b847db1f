"""Files that a user names, which may be of any kind: a pipe never ends, a device has no size.

All files named in settings are checked here before they are opened; folders are checked for files
that would be read. `Inputs` shows whether one changed while it was read."""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from workflow.lib.system.errors import UserError
from workflow.lib.system.files import file_sha256

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
NOT_THERE = "there is no such file or folder"
MOST_TEXT_BYTES = 2**26  # of a text that is read at once; the largest tokenizer.json has 32 MiB
MOST_HASHED_BYTES = 2**20  # of a file whose content is compared if only its times differ


def why_unreadable(path: Path) -> str | None:
    """Return why neither a file nor a folder can be read at `path`, None if one can. Links are
    followed. A missing permission on the folder above is a reason of its own."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            return f"it is a link to {path.readlink()}, and there is nothing"
        return NOT_THERE
    except PermissionError:
        return "you may not look into the folder above it"
    except OSError as error:  # a name too long, a loop of links
        return f"it cannot be opened ({error.strerror})"
    except ValueError:  # a NUL character
        return "no file can have this name"
    kind = stat.S_IFMT(mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        return f"it is {KINDS.get(kind, 'no file')}, and a file or a folder is read"
    if not os.access(path, os.R_OK | (os.X_OK if kind == stat.S_IFDIR else 0)):
        return "its owner and mode do not let you read it"
    return None


def read_input(path: Path, *, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Return the text of a file that a user names. Raises `UserError` if it is no regular file,
    unreadable, no UTF-8, or larger than `most_bytes`. Never blocks."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode):
            os.close(file)
            kind = KINDS.get(stat.S_IFMT(state.st_mode), "no file")
            raise UserError(f"{path}: it is {kind}. Put a file there.")
        with os.fdopen(file, "rb") as stream:
            if state.st_size > most_bytes:
                raise UserError(
                    f"{path}: it has {state.st_size:,} bytes, and at most {most_bytes:,} are read "
                    "as a text. Name the right file."
                )
            return stream.read().decode("utf-8-sig")
    except OSError as error:
        why = why_unreadable(Path(path)) or error.strerror
        raise UserError(f"{path}: {why}. Correct the path, or mend the file.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: it is no UTF-8 text ({error.reason}). Convert it.") from None


FileState = tuple[int, int, int, int]
"""Size, times of the last change of content and of attributes (ns), inode."""


class Inputs:
    """Files that a stage reads, as they were when it began. paths: files, and folders for the files
    directly in them (neither hidden nor Markdown). sha256: hashes that were taken of some."""

    def __init__(self, paths: Iterable[Path], *, sha256: Mapping[Path, str] | None = None) -> None:
        files = {file for path in paths for file in _files_of(path)} | {*(sha256 or {})}
        self._states = {file: _state(file) for file in sorted(files)}
        small = (f for f, state in self._states.items() if state and state[0] <= MOST_HASHED_BYTES)
        self._recorded = dict(sha256 or {})
        self._sha256 = {file: file_sha256(file) for file in small} | self._recorded

    def check(self) -> None:
        """Raise `UserError` if a file was changed, replaced or removed since."""
        for file, state in self._states.items():
            now = _state(file)
            if (now == state and file not in self._recorded) or (
                now is not None and self._sha256.get(file) == file_sha256(file)
            ):
                continue
            raise UserError(
                f"{file} was {'removed' if now is None else 'changed'} while it was read. Nothing "
                "of the result is kept, since a part may be of the file as it was before. Repeat "
                "the command when nothing writes to it any more."
            )


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_dir():
        files = (file for file in path.iterdir() if file.is_file())
        yield from (f for f in files if not f.name.startswith(".") and f.suffix != ".md")
    elif path.is_file():
        yield path


def _state(path: Path) -> FileState | None:
    try:
        now = path.stat()
    except OSError:
        return None
    return now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino
