"""Files on disk: written under a temporary name, fsynced, renamed; hashed; with provenance.

Nothing here imports torch: the driver, the preflight and the report use it too."""

import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Hexadecimal digits of a short hash: 48 bits, no collision among any user's artifacts.
KEY_LENGTH = 12
HASHED_AT_ONCE = 4  # files of a folder


def canonical_json(value: Any) -> str:
    """Serialize with sorted keys and no spaces, so that equal settings give equal strings."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def short_hash(value: Any) -> str:
    """Return the first `KEY_LENGTH` hexadecimal digits of `json_sha256`."""
    return json_sha256(value)[:KEY_LENGTH]


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def file_sha256(path: Path, *, on_progress: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal; `on_progress` is called after every
    MiB."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            on_progress()
    return digest.hexdigest()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`: fsynced and renamed on success, else removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp and safetensors keep other users out
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """fsync a file or directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(partial: Path, final: Path) -> None:
    """Rename a finished and fsynced folder to its final name; remove an existing one."""
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    sync(final.parent)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield an empty folder beside `final`: fsynced and renamed on success, else removed."""
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        replace_folder(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically, in another package's form; refuses NaN by `ValueError`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def with_checksum(value: Mapping[str, object]) -> dict[str, Any]:
    """Return a JSON object with `sha256`, the hash of all else in it as it will be read."""
    content: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    return {**content, "sha256": json_sha256(content)}


def verified(value: Any) -> dict[str, Any]:
    """Return a result of `with_checksum` without its `sha256`. Raises `ValueError` if that does not
    agree with the rest, `TypeError` if it is no object."""
    if not isinstance(value, dict):
        raise TypeError(f"is no JSON object, but a {type(value).__name__}")
    if value.pop("sha256", None) != json_sha256(value):
        raise ValueError("does not have the SHA-256 that it names")
    return value


def write_checked_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a JSON object with its `sha256` atomically."""
    write_json(path, with_checksum(value))


def read_checked_json(path: Path) -> dict[str, Any]:
    """Read a file of `write_checked_json`, without its `sha256`; raises as `verified`."""
    return verified(read_json(path))


SUMS = "SHA256SUMS"


def write_checksums(folder: Path) -> None:
    """Write `SHA256SUMS` (the format of `sha256sum`) over every file below `folder`."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != SUMS)
    with ThreadPoolExecutor(max_workers=HASHED_AT_ONCE) as pool:
        hashes = pool.map(file_sha256, files)
        lines = [
            f"{sha256}  {path.relative_to(folder).as_posix()}"
            for path, sha256 in zip(files, hashes, strict=True)
        ]
    write_text(folder / SUMS, "\n".join(lines) + "\n")


# Momentary failures of a machine or a network disk; the file itself may be sound.
PASSING = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT})


def is_passing(error: BaseException) -> bool:
    """Tell whether a failure to read a file is independent of its content."""
    return isinstance(error, OSError) and error.errno in PASSING


NO_SPACE = re.compile(r"os error (28|122|27)\b|No space left|quota exceeded", re.IGNORECASE)
UNWRITABLE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file size limit (ulimit -f) is reached",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "the folder may not be written",
    errno.EPERM: "the folder may not be written",
}


def unwritable(error: BaseException) -> str | None:
    """Return the message for a file that cannot be written, None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number not in UNWRITABLE and NO_SPACE.search(str(error)):
        number = errno.ENOSPC
    if number not in UNWRITABLE and number not in DELETED:
        return None
    name = getattr(error, "filename", None)
    if number in DELETED:
        return _deleted_meanwhile(name)
    where = f" ({name})" if name else ""
    return (
        f"{UNWRITABLE[number]}{where}. Every finished file is kept, and so is the last checkpoint. "
        "Mend that and repeat the command; it continues from there."
    )


DELETED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


def _deleted_meanwhile(name: object) -> str | None:
    """Return the message for a file whose folder is missing, None if it exists."""
    if not isinstance(name, str | os.PathLike) or Path(name).parent.is_dir():
        return None
    return (
        f"the folder {Path(name).parent} is not there: it was deleted or moved while the stage "
        "ran. Repeat the command: what is gone is made again."
    )


PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "trl",
    "liger_kernel",
    "datasets",
    "safetensors",
    "tokenizers",
    "lm_eval",
    "flash_attn",
    "snakemake",
)


def package_versions() -> dict[str, str]:
    """Return the version of every installed package that can change a result."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


# git refuses a checkout of another user, whose code already runs here
GIT = ("git", "-c", "safe.directory=*")


def source_commit() -> str | None:
    """Return the commit of this checkout, `-dirty` if it has changes; None outside one."""
    try:
        described = subprocess.run(
            [*GIT, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None


def provenance() -> dict[str, Any]:
    """Return the provenance of an artifact: stage, commit, versions, platform, UTC time; no host,
    user or absolute path."""
    return {
        "stage": Path(sys.argv[0]).stem.removesuffix("_worker"),
        "commit": source_commit(),
        "packages": package_versions(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "created_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
