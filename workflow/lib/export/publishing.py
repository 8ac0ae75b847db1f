"""Upload of exported files to a repository of the Hugging Face hub, after a check of what would
become public.

A repeated upload resumes: the hub keeps received large files, and does not get them again."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError

from workflow.lib.artifacts.records import Parity
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.data.reading.hub_download import TransportError
from workflow.lib.settings.errors_in_words import HUB_REPO
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import write_text

Form = Literal["adapter", "merged", "gguf"]
# The hub's relation to the base, the library that loads it, and its kind.
FORMS: dict[Form, tuple[str, str, str]] = {
    "merged": ("finetune", "transformers", "the merged model: base and adapter in one, bfloat16"),
    "gguf": ("quantized", "gguf", "GGUF files, for llama.cpp and Ollama"),
}
CARD = "README.md"
BASE = "base_model_name_or_path"  # key of adapter_config.json
# Absolute paths of two parts and more (a token may be called /think), upward ones, and addresses of
# files; a value with line breaks or braces is a text.
OUTSIDE = re.compile(
    r"(?:file:/+|~[^/\s]*/|(?:\.{1,2}/)*\.\./|[A-Za-z]:[\\/]|\\\\|/[^/\s]+/)[^\n{}<>|]*"
)
WEIGHTS = (".safetensors", ".gguf")
VOCABULARIES = ("tokenizer.json", "vocab.json")  # a token may be called anything
CHUNK = 2**20  # bytes searched at once


@dataclass(frozen=True)
class Publication:
    folder: Path
    card: Path  # uploaded as `README.md`, in place of the folder's
    form: Form
    repo_id: str
    private: bool

    @property
    def files(self) -> dict[str, Path]:
        """Return the uploaded files beside the card, by name."""
        return {path.relative_to(self.folder).as_posix(): path for path in _files(self.folder)}


def refuse_failed(summary: Summary, parity: Parity) -> None:
    """Raise `UserError` if a check of the training or of the export did not pass."""
    failed = [check.name for check in summary.checks if not check.passed]
    if not parity.passed:
        failed.append("the exported adapter gives the logits of the trained one")
    if failed:
        raise UserError(
            f"Nothing is published: a check failed ({'; '.join(failed)}). The report "
            "has all checks. Remove the cause, and run the stage that failed again."
        )


def refuse_private(publication: Publication) -> None:
    """Raise `UserError` if a file for upload names a path of this machine."""
    for path in [publication.card, *publication.files.values()]:
        for named in named_paths(path):
            raise UserError(
                f"Nothing is published: {path} names {named}. If it is the base model "
                "(adapter_config.json), name its hub id (export.base_id) and run again."
            )


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != CARD and not path.name.startswith("."):
            yield path


def card_text(publication: Publication) -> str:
    """Return the card, with the facts on the uploaded form for the hub and its readers."""
    text = publication.card.read_text(encoding="utf-8")
    if publication.form == "adapter":
        return text
    card, (relation, library, words) = ModelCard(text), FORMS[publication.form]
    card.data["library_name"] = library
    if card.data.get("base_model") is not None:
        card.data["base_model_relation"] = relation
    title, _, rest = card.text.strip().partition("\n")
    remark = f"This repository holds {words}. The rest of this card is of the run that made it."
    card.text = f"{title}\n\n{remark}\n{rest}\n"
    return str(card)


def upload(publication: Publication, *, message: str) -> str:
    """Make the repository if there is none, and upload in one commit; return the commit's address.
    Raises `UserError` with the hub's message if it refuses, and if the upload breaks off."""
    api = HfApi()
    try:
        api.create_repo(publication.repo_id, private=publication.private, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            staged = Path(temporary)
            for name, path in publication.files.items():
                (staged / name).parent.mkdir(exist_ok=True)
                (staged / name).symlink_to(path.resolve())
            write_text(staged / CARD, card_text(publication))
            done = api.upload_folder(
                repo_id=publication.repo_id, folder_path=staged, commit_message=message
            )
    except HfHubHTTPError as error:
        raise setting_error(
            "export.hub_repo",
            publication.repo_id,
            f"the hub refuses ({str(error).splitlines()[0]})",
            "Set HF_TOKEN to a token that may write there, and repeat the command",
        ) from error
    except (TransportError, RuntimeError, OSError) as error:  # RuntimeError: of a large file
        said = str(error.__cause__ or error).splitlines()
        raise setting_error(
            "export.hub_repo",
            publication.repo_id,
            f"the upload broke off ({said[0] if said else type(error).__name__}); nothing is "
            "visible there",
            "Repeat the command: large files that the hub has are not sent again",
        ) from error
    return str(done.commit_url)


def named_paths(path: Path) -> Iterator[str]:
    """Yield a file's references to this machine, in words."""
    if path.suffix == ".json" and path.name not in VOCABULARIES:
        for key, value in _settings(path):
            if key == BASE and not re.match(HUB_REPO, value):
                yield f"{value} as the base model ({key}), which is no id of the hub"
            elif OUTSIDE.fullmatch(value):
                yield f"{value} ({key}), a path of this machine"
    for folder in _found(path, private_folders()):
        yield f"{folder}, a folder of this machine"


def private_folders() -> list[str]:
    """Return prefixes of this machine's paths: home folder, this one, temporary files."""
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
    """Yield the folders that a file names, plain or as JSON escapes them."""
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
