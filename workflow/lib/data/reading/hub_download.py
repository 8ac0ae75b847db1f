"""Files of a Hugging Face hub repository at one commit: chosen, downloaded, verified.

The idea: everything is asked for by commit, never by branch, so a branch that moves meanwhile
changes nothing; and a folder appears under its name only when every byte in it was checked against
the hub's metadata (SHA-256 of LFS files, git blob id of the others). Until then the files lie in
the hidden sibling folder `.<name>.partial`, from which a repeated command goes on: finished files
are kept, others start again. Weights are safetensors only: pickles can run code when loaded, and
code is never fetched.

The access token (`HF_TOKEN`) and the endpoint (`HF_ENDPOINT`) are `huggingface_hub`'s business.
"""

import difflib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypedDict

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.hf_api import RepoFile

from workflow.lib.data.reading.sources import matching
from workflow.lib.model.architecture.model_files import (
    TEKKEN,
    TOKENIZERS,
    fault_of_files,
    fault_of_tokenizer,
)
from workflow.lib.model.architecture.safetensors_headers import INDEX, SINGLE
from workflow.lib.system.checksums import HUB_RECORD
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import file_sha256, read_json

MANIFEST = HUB_RECORD
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    *TOKENIZERS,
    TEKKEN,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)


@dataclass(frozen=True)
class Source:
    """What the user asked for.

    `revision` None is the main branch; `files` are of a dataset.
    """

    repo_id: str
    revision: str | None
    kind: Literal["model", "dataset"]
    files: Sequence[str] | None = None

    @property
    def section(self) -> str:
        """Section of `config.yaml` that names this source."""
        return {"model": "model", "dataset": "data"}[self.kind]

    def error(self, bound: str, change: str) -> UserError:
        """Return the error that this source broke `bound`."""
        return setting_error(f"{self.section}.source", self.repo_id, bound, change)


@dataclass(frozen=True)
class HubFile:
    """A file as the hub lists it.

    `sha256` is known for LFS files, `blob_id` (git) is right for the others.
    """

    path: str
    size: int  # bytes
    blob_id: str
    sha256: str | None


class DownloadedFile(TypedDict):
    """A file of a download; `size` in bytes."""

    path: str
    size: int
    sha256: str


class DownloadRecord(TypedDict):
    """`source.json` of a download: what was asked for, what it was, and every file."""

    repo_id: str
    kind: Literal["model", "dataset"]
    requested_revision: str | None
    commit: str
    files: list[DownloadedFile]


def resolve_commit(source: Source) -> str:
    """Return the commit that the revision names now."""
    info = HfApi().repo_info(source.repo_id, revision=source.revision, repo_type=source.kind)
    assert info.sha is not None, "the hub answers every repository request with its commit"
    return info.sha


def list_files(source: Source, *, commit: str) -> list[HubFile]:
    """Return all files of the repository at `commit`.

    Raises `UserError` if a path would leave the folder that it is saved in.
    """
    tree = HfApi().list_repo_tree(
        source.repo_id, revision=commit, repo_type=source.kind, recursive=True
    )
    files = [
        HubFile(entry.path, entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
        for entry in tree
        if isinstance(entry, RepoFile)
    ]
    for file in files:
        leaves = "\\" in file.path or any(p in ("", ".", "..") for p in file.path.split("/"))
        if leaves or not file.path.isprintable():  # it is logged: a terminal would obey escapes
            raise source.error(
                f"the repository lists the unsafe path {file.path!r}",
                "Do not use this repository",
            )
    return files


def choose_files(
    source: Source, listing: Sequence[HubFile], *, commit: str, folder: Path
) -> list[HubFile]:
    """Return the files to download, by path.

    Of a sharded model, the index is downloaded into `folder` to tell. Raises `UserError` if the
    repository lacks a file that is needed.
    """
    by_path = {file.path: file for file in listing}
    if source.kind == "dataset":
        wanted = _dataset_files(source, list(by_path))
    else:
        wanted = _model_files(source, list(by_path))
        if INDEX in wanted:
            fetch_file(source, by_path[INDEX], commit=commit, folder=folder)
            wanted |= weight_shards(source, folder / INDEX, listed=by_path)
    return [by_path[path] for path in sorted(wanted)]


def _model_files(source: Source, paths: Sequence[str]) -> set[str]:
    """Configuration, tokenizer, and the one weights file or the index of several."""
    fault = fault_of_files(paths) or fault_of_tokenizer(paths)
    if fault is not None:
        raise source.error(*fault)
    weights = next(name for name in (SINGLE, INDEX) if name in paths)
    return {weights} | {path for path in paths if _matches(path, MODEL_FILES)}


def weight_shards(source: Source, index: Path, *, listed: Iterable[str]) -> set[str]:
    """Names of the weight files in an index; raises `UserError` if it is none."""
    try:
        shards = set(map(str, read_json(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise source.error(
            f"{INDEX} of this repository is no index of a checkpoint ({error!r})",
            f"Set {source.section}.revision to a complete commit, or name another repository",
        ) from None
    wrong = sorted(s for s in shards if s not in listed or not s.endswith(".safetensors"))
    if wrong:
        raise source.error(
            f"{INDEX} names {_some(wrong)}, no safetensors file of this repository",
            f"Set {source.section}.revision to a complete commit, or name another repository",
        )
    return shards


def _dataset_files(source: Source, paths: Sequence[str]) -> set[str]:
    """The named files, those of named folders, and what globs match (`sources.matching`)."""
    chosen: set[str] = set()
    for name in source.files or ():
        matches = matching(paths, name)
        if not matches:
            near = difflib.get_close_matches(name, paths, n=5, cutoff=0.5)
            hint = f"near names are {_some(near)}" if near else f"it has {_some(paths)}"
            raise UserError(
                f"data.train or data.heldout = {name!r}: the dataset {source.repo_id!r} has no "
                f"such file; {hint}. Set it to a path in the dataset's repository."
            )
        chosen |= matches
    if MANIFEST in chosen:
        raise source.error(
            f"{MANIFEST} is the name of this workflow's manifest", "Name another file"
        )
    return chosen


def _matches(path: str, patterns: Iterable[str]) -> bool:
    """Tell whether a pattern of the same depth matches: `*` does not cross a slash."""
    return any(path.count("/") == p.count("/") and fnmatchcase(path, p) for p in patterns)


def _some(names: Sequence[str], *, limit: int = 8) -> str:
    """Spell a list that may be long or empty."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest or "no files"


def check_disk_space(source: Source, files: Sequence[HubFile], *, folder: Path) -> None:
    """Raise `UserError` if what `folder` still lacks does not fit on its disk."""
    needed = sum(file.size for file in files if not _has_size(folder / file.path, file.size))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise source.error(
            f"{needed / 2**30:.1f} GiB are to be downloaded, {free / 2**30:.1f} GiB are free on "
            "the disk",
            "Free the difference, or run in a folder on a larger disk",
        )


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def fetch_file(source: Source, file: HubFile, *, commit: str, folder: Path) -> str:
    """Download one file into `folder` unless it is there already, and return its verified SHA-256.

    Raises `UserError`, and removes the file, if its bytes are not those that the hub announced.
    """
    hf_hub_download(
        source.repo_id, file.path, repo_type=source.kind, revision=commit, local_dir=folder
    )
    path = folder / file.path
    sha256 = file_sha256(path)
    correct = sha256 == file.sha256 if file.sha256 else _git_blob_id(path) == file.blob_id
    if not correct or path.stat().st_size != file.size:
        path.unlink()
        raise UserError(
            f"{file.path} of {source.repo_id} was damaged on the way: its size or checksum is not "
            "what the hub announces. It was removed; repeat the command to download it again."
        )
    with path.open("rb") as synced:
        os.fsync(synced.fileno())
    return sha256


def _git_blob_id(path: Path) -> str:
    """Name of a file's content in git: SHA-1 of a header and the bytes.

    Files outside LFS are small.
    """
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def manifest(
    source: Source, files: Sequence[HubFile], *, commit: str, sha256: Mapping[str, str]
) -> DownloadRecord:
    """Return the content of `source.json`."""
    return {
        "repo_id": source.repo_id,
        "kind": source.kind,
        "requested_revision": source.revision,
        "commit": commit,
        "files": [{"path": f.path, "size": f.size, "sha256": sha256[f.path]} for f in files],
    }


@contextmanager
def partial_folder(output: Path) -> Iterator[Path]:
    """Yield the locked folder `.<name>.partial` beside `output`, until `publish` renames it.

    Raises `UserError` if `output` has content, or another process downloads to it.
    """
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise setting_error("--output", str(output), "it exists already", "Remove it first")
    partial = output.parent / f".{output.name}.partial"
    cache = partial / ".cache"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise setting_error(
                "--output", str(output), "another process is downloading to it", "Wait for it"
            ) from None
        yield partial


def publish(partial: Path, output: Path, *, keep: Iterable[str]) -> None:
    """Remove all but the files `keep` from the partial folder, and give it its name."""
    published = {partial / path for path in keep}
    shutil.rmtree(partial / ".cache")
    for path in sorted(partial.rglob("*"), reverse=True):  # reverse: contents before their folder
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in published:
            path.unlink()
    partial.replace(output)
