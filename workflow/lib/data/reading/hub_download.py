"""Files of a Hugging Face hub repository at one commit: chosen, downloaded, verified.

A folder gets its name only when its files have the hub's checksums. Until then they lie in
`.<name>.partial`, and a repeated command resumes from there. Weights are safetensors only, and code
is never fetched. `huggingface_hub` reads `HF_TOKEN` and `HF_ENDPOINT`."""

import errno
import glob
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, ModelCard, errors, hf_hub_download, snapshot_download
from huggingface_hub.hf_api import RepoFile

from workflow.lib.checkpoints.files.model_files import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    PROCESSOR_PATTERN,
    TEKKEN,
    TOKENIZERS,
    fault_of_adapter,
    fault_of_files,
    fault_of_tokenizer,
)
from workflow.lib.checkpoints.files.safetensors_headers import INDEX, SINGLE
from workflow.lib.data.reading.sources import matching
from workflow.lib.system.checksums import HUB_RECORD, read_artifact
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import file_sha256, read_json, sync
from workflow.lib.system.near_names import near_path, near_paths
from workflow.lib.system.number_formats import listed_names

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
    PROCESSOR_PATTERN,
    "additional_chat_templates/*.jinja",
)
# The HTTP client's base error: httpx2's or httpx's, whichever this version of huggingface_hub uses.
TransportError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
REPEAT = "repeat the command: finished files are kept"
LOCAL = {
    "model": "set model.source to a folder that exists",
    "dataset": "set data.source to null and data.train to a file or folder that exists",
    "adapter": "set train.start_from to a run or to a folder that exists",
    "scored": "name a run or a folder that exists",
}
SETTINGS = {
    "model": "model.source",
    "dataset": "data.source",
    "adapter": "train.start_from",
    "scored": "preferences.reference or distill.teacher",
}


@dataclass(frozen=True)
class Source:
    """A repository of the hub; `revision` None is the main branch, `files` are of a dataset."""

    repo_id: str
    revision: str | None
    kind: Literal["model", "dataset", "adapter", "scored"]
    """`scored` is a model or an adapter."""
    files: Sequence[str] | None = None

    @property
    def section(self) -> str:
        return SETTINGS[self.kind].partition(".")[0]

    @property
    def repo_type(self) -> str:
        return "dataset" if self.kind == "dataset" else "model"

    def error(self, bound: str, change: str) -> UserError:
        """Return the error of the setting that names the repository."""
        return setting_error(SETTINGS[self.kind], self.repo_id, bound, change)


def list_files(source: Source) -> tuple[str, str | None, list[RepoFile]]:
    """Return the revision's commit now, its licence if it names one, and its files."""
    api, kind = HfApi(), source.repo_type
    info: Any = api.repo_info(source.repo_id, revision=source.revision, repo_type=kind)
    commit, licence = info.sha, (info.card_data or {}).get("license")
    assert commit is not None, "the hub answers every repository request with its commit"
    tree = api.list_repo_tree(source.repo_id, revision=commit, repo_type=kind, recursive=True)
    files = [entry for entry in tree if isinstance(entry, RepoFile)]
    check_paths(source, [file.path for file in files])
    return commit, licence_words(licence), files


def licence_words(licence: Any) -> str | None:
    """Return the licence of a card, which may be a list; None without one."""
    return ", ".join(map(str, [licence] if isinstance(licence, str) else licence or [])) or None


def licence_of(paths: Iterable[Path]) -> str | None:
    """Return the licences of files or folders, by a download's record or the card beside them."""
    folders = {path if path.is_dir() else path.parent for path in paths}
    return (
        ", ".join(sorted({licence for folder in folders if (licence := _licence(folder))})) or None
    )


def _licence(folder: Path) -> str | None:
    record = read_artifact(folder / HUB_RECORD) if (folder / HUB_RECORD).is_file() else {}
    if "licence" in record:  # not in that of a local model's copy
        return licence_words(record["licence"])
    card = folder / "README.md"
    if not card.is_file() or not card.read_bytes().startswith(b"---"):  # no card of the hub's
        return None
    return licence_words(ModelCard.load(card, ignore_metadata_errors=True).data.get("license"))


def check_paths(source: Source, paths: Iterable[str]) -> None:
    """Raise `UserError` if a path would leave the download folder."""
    for path in paths:
        leaves = "\\" in path or any(part in ("", ".", "..") for part in path.split("/"))
        if leaves or not path.isprintable():  # it is logged: a terminal would obey escapes
            raise source.error(
                f"the repository lists the unsafe path {path!r}", "Do not use this repository"
            )


def choose_files(source: Source, paths: Sequence[str], *, commit: str, folder: Path) -> set[str]:
    """Return the files to download. For a sharded model this downloads the index into `folder`.
    Raises `UserError` if the repository lacks a needed file."""
    if source.kind == "dataset":
        return _dataset_files(source, paths)
    is_adapter = source.kind == "adapter" or (source.kind == "scored" and ADAPTER in paths)
    if is_adapter:
        fault = fault_of_adapter(paths)
    else:
        fault = fault_of_files(paths) or fault_of_tokenizer(paths)
    if fault is not None:
        raise source.error(*fault)
    if is_adapter:
        return {ADAPTER, ADAPTER_WEIGHTS}
    chosen = {path for path in paths if _matches(path, MODEL_FILES)}
    if SINGLE in paths:
        return chosen | {SINGLE}
    index = fetch_first(source, INDEX, commit=commit, folder=folder)
    return chosen | {INDEX} | weight_shards(source, index, listed=paths)


def weight_shards(source: Source, index: Path, *, listed: Iterable[str]) -> set[str]:
    """Names of the weight files in an index; raises `UserError` if it is no index."""
    change = f"Set {source.section}.revision to a complete commit, or name another repository"
    try:
        shards = set(map(str, read_json(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise source.error(
            f"{INDEX} of this repository is no index of a checkpoint ({error!r})", change
        ) from None
    unusable = sorted(s for s in shards if s not in listed or not s.endswith(".safetensors"))
    if unusable:
        raise source.error(
            f"{INDEX} names {listed_names(unusable)}, no safetensors file of this repository",
            change,
        )
    return shards


def _dataset_files(source: Source, paths: Sequence[str]) -> set[str]:
    """Return the files that the settings name: files, contents of folders, and matches of globs
    (`sources.matching`)."""
    chosen: set[str] = set()
    for name in source.files or ():
        matches = matching(paths, name)
        if not matches:
            near = near_paths(name, paths, count=5)
            hint = (
                f"near names are {listed_names(near)}" if near else f"it has {listed_names(paths)}"
            )
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


def check_disk_space(source: Source, sizes: Mapping[str, int], *, folder: Path) -> None:
    """Raise `UserError` if the files that `folder` lacks do not fit on its disk."""
    present = {path: (folder / path).stat().st_size for path in sizes if (folder / path).is_file()}
    download_bytes = sum(size for path, size in sizes.items() if present.get(path) != size)
    free = shutil.disk_usage(folder).free
    if download_bytes > free:
        raise source.error(
            f"{download_bytes / 2**30:.1f} GiB are to be downloaded, {free / 2**30:.1f} GiB are "
            "free on the disk",
            "Free the difference, or run in a folder on a larger disk",
        )


def fetch_first(source: Source, path: str, *, commit: str, folder: Path) -> Path:
    """Download one file again; raises the hub's error."""
    options: Any = {"repo_type": source.repo_type, "revision": commit, "local_dir": folder}
    try:
        return Path(hf_hub_download(source.repo_id, path, **options, force_download=True))
    except ValueError as error:  # "Force download failed" hides the hub's answer
        raise error.__cause__ or error from None


def fetch(source: Source, paths: Iterable[str], *, commit: str, folder: Path) -> None:
    """Download the files that `folder` lacks, and verify all. A file with other bytes than the hub
    announced is removed; raises `UserError`."""
    options: Any = {"repo_type": source.repo_type, "revision": commit, "local_dir": folder}
    patterns = [glob.escape(path) for path in paths]
    snapshot_download(source.repo_id, **options, allow_patterns=patterns)
    verification = HfApi().verify_repo_checksums(source.repo_id, **options)
    damaged = sorted(mismatch["path"] for mismatch in verification.mismatches)
    for path in damaged:
        (folder / path).unlink()
    if damaged:
        raise UserError(
            f"{listed_names(damaged)} of {source.repo_id} was damaged on the way: the checksum is "
            "not what the hub announces. It was removed; repeat the command to download it again."
        )


def record(
    source: Source, files: Iterable[RepoFile], *, commit: str, licence: str | None, folder: Path
) -> dict[str, Any]:
    """Return the content of `source.json`: the requested source, its commit, and every file."""
    return {
        "repo_id": source.repo_id,
        "kind": source.kind,
        "requested_revision": source.revision,
        "commit": commit,
        "licence": licence,
        "files": [
            {
                "path": file.path,
                "size": file.size,
                "sha256": file.lfs.sha256 if file.lfs else file_sha256(folder / file.path),
            }
            for file in files
        ],
    }


def partial_folder(output: Path) -> Path:
    """Make `.<name>.partial` beside `output`; raises `UserError` if `output` has content."""
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise setting_error("--output", str(output), "it exists already", "Remove it first")
    partial = output.parent / f".{output.name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def publish(partial: Path, output: Path, *, keep: Iterable[str]) -> None:
    """Remove all but the files `keep` from the partial folder, and give it its name."""
    kept_paths = {partial / path for path in keep}
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    for path in sorted(partial.rglob("*"), reverse=True):  # reverse: contents before their folder
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path in kept_paths:
            sync(path)
        else:
            path.unlink()
    partial.replace(output)


@contextmanager
def explained_errors(source: Source) -> Iterator[None]:
    """Turn errors of the hub, the network and the disk into `UserError` with what to change."""
    try:
        yield
    except (OSError, TransportError, errors.HFValidationError) as error:
        explained = explain(source, error)
        if explained is None:
            raise
        raise explained from error


def explain(source: Source, error: Exception) -> UserError | None:
    """Return an exception as a message for the user; None beyond hub, network and disk. The order
    matters: huggingface_hub derives "gated" from "not found", both from HTTP errors."""
    local = LOCAL[source.kind]
    # a mistyped folder name looks like an id of the hub
    near = near_path(source.repo_id, root=Path(), is_folder=True)
    other = "" if near is None else f", but {near} is"
    taken = f"no folder {source.repo_id} is here{other}, so it was taken as a hub id"
    unknown = f"{taken}, and the hub has no {source.kind} of that name that you may read"
    match error:
        case errors.GatedRepoError():
            prefix = "datasets/" if source.kind == "dataset" else ""
            return source.error(
                "the hub gives it only to those who accepted its licence",
                f"Accept the licence on {HfApi().endpoint}/{prefix}{source.repo_id} and set "
                "HF_TOKEN to a token of that account",
            )
        case errors.RepositoryNotFoundError():
            private = "if the repository is private, set HF_TOKEN"
            return source.error(unknown, f"Correct the id owner/name, or {local}; {private}")
        case errors.HFValidationError():
            return source.error(unknown, f"Correct the id owner/name, or {local}")
        case errors.RevisionNotFoundError():
            return source.error(
                f"it has no branch, tag or commit {source.revision!r}",
                f"Correct {source.section}.revision, or set it to null for the main branch",
            )
        case errors.OfflineModeIsEnabled():
            offline = f"{taken}, and HF_HUB_OFFLINE forbids asking the hub"
            return source.error(offline, f"Unset HF_HUB_OFFLINE, or {local}")
        case errors.HfHubHTTPError():
            return source.error(
                f"{taken}, and the hub refused ({_first_line(error)})",
                f"If that names access or a token, check HF_TOKEN; else wait and {REPEAT}",
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            full = "the disk, or your quota on it, is full"
            return source.error(full, f"Free space and {REPEAT}")
        case OSError(errno=int()):
            return None
    return source.error(
        f"{taken}, and the download broke off ({_first_line(error.__cause__ or error)})",
        f"If it is one, check the network, HF_ENDPOINT if you set it, and {REPEAT}; if it is a "
        f"folder of yours, {local}",
    )


def _first_line(error: BaseException) -> str:
    """Return type and first line with text: the hub's messages start with empty lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])
