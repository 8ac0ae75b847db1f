"""From settings to files: the files of a source, in order, and their type.

A source is a file, a folder, a saved dataset, or a glob (`**` crosses folders), below the working
directory or a hub dataset (`hub_paths`). Files are sorted by name. Reads no data."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow.lib.data.reading.compression import EXTENSIONS, file_type_of, type_by_name
from workflow.lib.settings.data import DataColumns, DataConfig, DataSource, FileType, Overlong
from workflow.lib.system.checksums import HUB_RECORD
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.input_files import NOT_THERE, why_unreadable
from workflow.lib.system.near_names import did_you_mean

SAVED_STATE = "state.json"  # in a folder written by Dataset.save_to_disk
SAVED_SPLITS = "dataset_dict.json"  # in a folder written by DatasetDict.save_to_disk
MAGIC = re.compile(r"[*?\[]")
HUB_ID = re.compile(r"\w[\w.-]*/[\w-]+(\.\d[\w-]*)?")  # no file's extension
SHELL_NAME = re.compile(r"\$\{?[A-Za-z_]")
PICK = "Name the files by a glob"


@dataclass(frozen=True)
class SourceFile:
    """A data file: its path, its name in listings, and its checksum."""

    path: Path
    file: str
    file_type: FileType


@dataclass(frozen=True)
class Source:
    """The files of an entry of `data.train` or `data.heldout`, at least one, and its settings."""

    name: str
    weight: float
    format: str
    columns: DataColumns
    group_by: str | None
    overlong: Overlong
    files: tuple[SourceFile, ...]


def resolve_splits(settings: DataConfig, *, root: Path) -> dict[str, list[Source]]:
    """Return the sources of `train`, and of `heldout` unless it is split off. root: paths are
    relative to it. Raises `UserError` if an entry names no file, or a file is named twice."""
    splits = {
        "train": resolve_sources(settings.train_sources, setting="data.train", root=root),
        "heldout": resolve_sources(settings.heldout_sources, setting="data.heldout", root=root),
    }
    _check_disjoint(splits)
    return {name: sources for name, sources in splits.items() if sources}


def resolve_sources(
    entries: Sequence[DataSource], *, setting: str, root: Path = Path()
) -> list[Source]:
    """Return each entry's files; setting: the key that lists the entries. Raises `UserError` if an
    entry names no file, or two have one name."""
    sources = [_resolve(entry, setting=setting, root=root) for entry in entries]
    for name, count in Counter(source.name for source in sources).items():
        if count > 1:
            change = "Give each a `name` of its own"
            raise setting_error(setting, name, f"{count} sources have this name", change)
    return sources


def _resolve(entry: DataSource, *, setting: str, root: Path) -> Source:
    paths = find_files(entry.path, setting=setting, root=root)
    assert entry.columns is not None, "DataConfig fills in the columns"
    assert entry.format is not None, "DataConfig fills in the format"
    assert entry.overlong is not None, "DataConfig fills in what becomes of long rows"
    file_type = None if entry.file_type == "auto" else entry.file_type
    files = [
        SourceFile(root / path, path, file_type or file_type_of(Path(path), setting=setting))
        for path in paths
    ]
    return Source(
        name=entry.name or entry.path,
        weight=entry.weight,
        format=entry.format,
        columns=entry.columns,
        group_by=entry.group_by,
        overlong=entry.overlong,
        files=tuple(files),
    )


def find_files(path: str, *, setting: str, root: Path) -> list[str]:
    """Return the files of a path, folder or glob below `root`, spelled alike; at least one."""
    try:
        files = _named_files(path, root=root, setting=setting)
    except UserError:  # a ValueError too
        raise
    except (OSError, ValueError, NotImplementedError):  # a name that no file can have, or a**b
        files = []
    if not files:
        missing = "no file matches"
        if not MAGIC.search(path) or why_unreadable(root / path) != NOT_THERE:
            missing = why_unreadable(root / path) or NOT_THERE
        near = did_you_mean(path, root=root) if missing == NOT_THERE else ""
        if HUB_ID.fullmatch(path) and setting.startswith("data.") and root == Path() and not near:
            near = f"A dataset of the hub is named by data.source, and its files by {setting}. "
        where = "the folder you run in" if root == Path() else f"the dataset's repository ({root})"
        raise setting_error(
            setting,
            path,
            missing,
            f"{unexpanded(path)}{near}Give a path that exists, relative to {where}",
        )
    return files


def unexpanded(path: str) -> str:
    """Return the advice for `~` or `$NAME` in a path, which only shells expand, or for an address;
    else "". Settings must not depend on who runs them, or where: artifacts are named by them."""
    if path.startswith("~") or SHELL_NAME.search(path):
        return "~ and $NAME are not expanded in settings: write the path out. "
    if "://" in path:
        return "Addresses are not read: load the file, or name a repository of the hub by its id. "
    return ""


def _named_files(path: str, *, root: Path, setting: str) -> list[str]:
    target = root / path
    if target.is_file():
        return [path]
    if target.is_dir() and why_unreadable(target) is None:
        return [str(Path(path, name)) for name in _folder_files(target, path, setting)]
    return _glob(path, root, setting=setting) if MAGIC.search(path) else []


def _glob(pattern: str, root: Path, *, setting: str) -> list[str]:
    """Return the files that a glob matches, sorted; as in a shell, `*` matches no hidden name."""
    pattern_path = Path(pattern)
    start = Path(pattern_path.anchor) if pattern_path.is_absolute() else root
    below = (
        pattern_path.relative_to(pattern_path.anchor)
        if pattern_path.is_absolute()
        else pattern_path
    )
    walked = below / "*" if below.name == "**" else below
    paths = list(start.glob(str(walked)))
    names = [str(path if pattern_path.is_absolute() else path.relative_to(root)) for path in paths]
    pattern_regex = _glob_regex(str(pattern_path))
    matches = {
        name: path for name, path in zip(names, paths, strict=True) if pattern_regex.fullmatch(name)
    }
    for name, path in matches.items():
        _check_link(path, name, pattern, setting)
    return sorted(name for name, path in matches.items() if path.is_file())


def _check_link(path: Path, name: str, pattern: str, setting: str) -> None:
    """Raise `UserError` for a link to no file, which would silently be skipped. A link to a file is
    read, also outside of the folder."""
    if path.is_symlink() and not path.is_file():
        where = "to a folder, which is not searched" if path.is_dir() else "nowhere"
        change = "Name that folder itself" if path.is_dir() else "Mend or remove the link"
        raise setting_error(setting, pattern, f"the link {name} in it leads {where}", change)


def _folder_files(folder: Path, path: str, setting: str) -> list[str]:
    """Return the files of a saved dataset, or a folder's data files, which must have one type."""
    if (folder / SAVED_SPLITS).is_file():
        splits = _read_record(folder / SAVED_SPLITS, setting).get("splits", [])
        raise setting_error(
            setting,
            path,
            f"the folder is a saved DatasetDict with the splits {', '.join(map(str, splits))}",
            f"Name the folder of one: {path.rstrip('/')}/<split>",
        )
    if (folder / SAVED_STATE).is_file():
        return _saved_files(folder, path, setting)
    below = {str(entry.relative_to(folder)): entry for entry in folder.rglob("*")}
    visible = {
        name: entry
        for name, entry in below.items()
        if not any(part.startswith((".", "_")) for part in Path(name).parts)
    }
    for name, entry in visible.items():
        if type_by_name(Path(name)) or entry.is_dir():
            _check_link(entry, name, path, setting)
            if (why := why_unreadable(entry)) is not None:
                raise setting_error(setting, path, f"{name} in it: {why}", "Remove or mend it")
    names = sorted(
        name
        for name, entry in visible.items()
        if type_by_name(Path(name)) and name != HUB_RECORD and entry.is_file()
    )
    types = sorted({str(type_by_name(Path(name))) for name in names})
    if not names:
        raise setting_error(
            setting, path, f"the folder holds no file that ends in {', '.join(EXTENSIONS)}", PICK
        )
    if len(types) > 1:
        raise setting_error(
            setting, path, f"the folder holds files of several types ({', '.join(types)})", PICK
        )
    return names


def _saved_files(folder: Path, path: str, setting: str) -> list[str]:
    """Return a saved dataset's listed files, without caches beside them."""
    state = _read_record(folder / SAVED_STATE, setting)
    listed = state.get("_data_files")
    entries = listed if isinstance(listed, list) else []
    names = [str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if state.get("_indices_data_files"):
        bound = "the saved dataset is a selection of rows that was never written out"
        raise setting_error(setting, path, bound, "Call flatten_indices() and save it again")
    if missing or not names:
        bound = f"{SAVED_STATE} names {', '.join(missing[:3]) or 'no file'}, which is not there"
        raise setting_error(setting, path, bound, "Save the dataset again")
    return names


def _read_record(path: Path, setting: str) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise setting_error(
            setting, str(path), f"it cannot be read ({error})", "Save the dataset again"
        ) from None
    return record if isinstance(record, dict) else {}


def _check_disjoint(splits: dict[str, list[Source]]) -> None:
    """Raise `UserError` for a file named twice: by mistake, or for training and evaluation."""
    first: dict[Path, str] = {}
    for split, sources in splits.items():
        for source in sources:
            for file in source.files:
                key, entry = file.path.resolve(), f"data.{split} ({source.name})"
                if key in first:
                    raise UserError(
                        f"{entry} names {file.file}, and so does {first[key]}. Name every file "
                        "once; to train on one more often, give its source a weight."
                    )
                first[key] = entry


def matching(paths: Iterable[str], pattern: str) -> set[str]:
    """Return the paths of a listing that `find_files` would take for `pattern`: a file, a folder
    with its content, or a glob."""
    paths = list(paths)
    name = "" if pattern in (".", "./") else pattern.rstrip("/")
    if name in paths:
        return {name}
    below = {path for path in paths if not name or path.startswith(name + "/")}
    return below or {path for path in paths if _glob_regex(name).fullmatch(path)}


def _glob_regex(pattern: str) -> re.Pattern[str]:
    """Translate a glob: `*`, `?` stay in a folder, `**/` crosses; dotted names are hidden."""
    folders = r"(?:(?!\.)[^/]+/)*"
    words = {"**/": folders, "**": folders + r"(?!\.)[^/]*", "*": r"[^/]*", "?": r"[^/]"}
    tokens = re.findall(r"\*\*/|\*\*|\[!?[^\]/]+\]|.", pattern)
    parts, starts = [], True
    for token in tokens:
        hidden = r"(?!\.)" if starts and token in ("*", "?") else ""
        is_set = token.startswith("[") and len(token) > 1
        plain = re.sub(r"^\[!", "[^", token) if is_set else re.escape(token)
        parts.append(hidden + words.get(token, plain))
        starts = token.endswith("/")
    return re.compile("".join(parts), re.DOTALL)
