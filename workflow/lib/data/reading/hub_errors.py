"""What the hub, the network and the disk raise, as messages that say what to change.

The order of `_explanations` matters: huggingface_hub derives "gated" from "not found", and both
from its general HTTP error.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import HfApi, errors

from workflow.lib.data.reading.hub_download import Source
from workflow.lib.system.errors import UserError

# The HTTP client's base error: httpx2's or httpx's, whichever this version of huggingface_hub uses.
TransportError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
REPEAT = "repeat the command: finished files are kept"
LOCAL = {
    "model": "set model.source to a folder that exists",
    "dataset": "set data.source to null and data.train to a file or folder that exists",
}


@contextmanager
def explained_errors(source: Source) -> Iterator[None]:
    """Turn what the hub, the network and the disk raise into `UserError` with what to change."""
    try:
        yield
    except (OSError, TransportError, errors.HFValidationError) as error:
        explained = explain(source, error)
        if explained is None:
            raise
        raise explained from error


def explain(source: Source, error: Exception) -> UserError | None:
    """Say what an exception means for the user.

    None if it concerns neither hub, network nor a full disk.
    """
    for kind, bound, change in _explanations(source, error):
        if isinstance(error, kind):
            return source.error(bound, change)
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return source.error("the disk, or your quota on it, is full", f"Free space and {REPEAT}")
    if number is not None:
        return None
    return source.error(
        f"{_taken(source)}, and the download broke off ({_first_line(error.__cause__ or error)})",
        f"If it is one, check the network, HF_ENDPOINT if you set it, and {REPEAT}; if it is a "
        f"folder of yours, {LOCAL[source.kind]}",
    )


def _taken(source: Source) -> str:
    """Say why the hub was asked: a mistyped folder name looks like an id of the hub."""
    return f"no folder {source.repo_id} is here, so it was taken as a hub id"


def _explanations(source: Source, error: Exception) -> list[tuple[type[Exception], str, str]]:
    """Rows of exception, bound that was broken, change."""
    page = f"{HfApi().endpoint}/{'datasets/' if source.kind == 'dataset' else ''}{source.repo_id}"
    local = LOCAL[source.kind]
    unknown = f"{_taken(source)}, and the hub has no {source.kind} of that name that you may read"
    return [
        (
            errors.GatedRepoError,
            "the hub gives it only to those who accepted its licence",
            f"Accept the licence on {page} and set HF_TOKEN to a token of that account",
        ),
        (
            errors.RepositoryNotFoundError,
            unknown,
            f"Correct the id owner/name, or {local}; if the repository is private, set HF_TOKEN",
        ),
        (errors.HFValidationError, unknown, f"Correct the id owner/name, or {local}"),
        (
            errors.RevisionNotFoundError,
            f"it has no branch, tag or commit {source.revision!r}",
            f"Correct {source.section}.revision, or set it to null for the main branch",
        ),
        (
            errors.OfflineModeIsEnabled,
            f"{_taken(source)}, and HF_HUB_OFFLINE forbids asking the hub",
            f"Unset HF_HUB_OFFLINE, or {local}",
        ),
        (
            errors.HfHubHTTPError,
            f"{_taken(source)}, and the hub refused ({_first_line(error)})",
            f"If that names access or a token, check HF_TOKEN; else wait and {REPEAT}",
        ),
    ]


def _first_line(error: BaseException) -> str:
    """Type and first line that says something: the hub's messages start with empty ones."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])
