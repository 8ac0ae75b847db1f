"""What a misspelt name or path may have meant: among things of its own kind alone."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

CUTOFF = 0.7  # difflib's ratio: one wrong letter of four, and "nofile" is not "profiles"
SHORTEST_PART = 4  # letters of a name that may stand for longer ones
SUFFIXES = re.compile(r"(\.[A-Za-z]\w*)+$")  # not the .5 of a model's folder


def near_names(name: str, names: Iterable[str], *, count: int = 1) -> list[str]:
    """Return up to `count` of `names`: spelled almost like `name`, nearest first; then those that
    contain it, shortest first. Upper and lower case are the same."""
    by_folded = {other.casefold(): other for other in names}
    folded = name.casefold()
    near = difflib.get_close_matches(folded, by_folded, n=count, cutoff=CUTOFF)
    if len(folded) >= SHORTEST_PART:
        near += sorted((x for x in by_folded if folded in x and x not in near), key=len)
    return [by_folded[other] for other in near[:count]]


def near_paths(
    path: str, files: Iterable[str], *, folders: Iterable[str] = (), count: int = 1
) -> list[str]:
    """Return up to `count` of `files` whose suffix and rest are each spelled almost like those of
    `path`; if it has no suffix, files of any type, and `folders`."""
    suffix = _suffix(path)
    alike = [x for x in files if not suffix or near_names(suffix, [_suffix(x)])]
    by_stem = {other.removesuffix(_suffix(other)): other for other in alike}
    by_stem |= {} if suffix else {folder: folder for folder in folders}
    near = near_names(path.removesuffix(suffix), by_stem, count=count)
    return [by_stem[stem] for stem in near]


def near_path(path: str, *, root: Path, is_folder: bool = False) -> str | None:
    """Return a path that exists and that a missing one may have meant; None if there is none.

    root: both are relative to it. is_folder: a folder is meant."""
    whole = Path(path)
    misspelt = next(
        (part for part in (whole, *whole.parents) if (root / part.parent).is_dir()), whole
    )
    names = _near_entries(root / misspelt, only_folders=is_folder or misspelt != whole)
    paths = [misspelt.with_name(name) / whole.relative_to(misspelt) for name in names]
    return next((str(other) for other in paths if (root / other).exists()), None)


def did_you_mean(path: str, *, root: Path, is_folder: bool = False) -> str:
    """Return a question for `near_path`, with a blank at its end; empty if there is none."""
    near = near_path(path, root=root, is_folder=is_folder)
    return "" if near is None else f"Did you mean {near!r}? "


def _near_entries(missing: Path, *, only_folders: bool) -> list[str]:
    try:
        beside = [entry for entry in missing.parent.iterdir() if not entry.name.startswith(".")]
    except (OSError, ValueError):  # no such folder, or a name that none can have
        return []
    folders = [entry.name for entry in beside if entry.is_dir()]
    if only_folders:
        return near_names(missing.name, folders)
    files = [entry.name for entry in beside if entry.is_file()]
    return near_paths(missing.name, files, folders=folders)


def _suffix(path: str) -> str:
    match = SUFFIXES.search(path)
    return match[0] if match else ""
