"""Upload of exported files to a repository of the Hugging Face hub, after a check of what would
become public.

A repeated upload resumes: the hub keeps received large files, and does not get them again. Paths of
this machine, secrets, and files that hold code must not be uploaded. Every file is read: texts
whole, of weights the header. Tokens of a vocabulary may be any text, so in vocabularies only this
machine's own folders and secrets count."""

import json
import os
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError

from workflow.lib.artifacts.records import Parity
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.checkpoints.files.safetensors_headers import read_header
from workflow.lib.data.reading.hub_download import TransportError
from workflow.lib.settings.config import is_hub_id
from workflow.lib.settings.forms import EXPORTS, HubForm
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import write_text
from workflow.lib.system.redaction import holds_secret, secret_values

CARD = "README.md"
BASE = "base_model_name_or_path"  # key of adapter_config.json
WEIGHTS = (".safetensors", ".gguf")
# SHA256SUMS, Modelfile and licences have no extension.
KINDS = (*WEIGHTS, ".json", ".jsonl", ".jinja", ".md", ".txt", ".model", "")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model")
# A value that is an absolute path of two parts and more (a token may be called /think), one out of
# the folder, or an address of a file. A value with line breaks or braces is a text.
OUTSIDE = re.compile(
    r"(?:file:/+|~[^/\s]*/|(?:\.{1,2}/)*\.\./|[A-Za-z]:[\\/]|\\\\|/[^/\s]+/)[^\n{}<>|]*"
)
# Beside the folders of this machine.
ROOTS = ("home", "Users", "Volumes", "mnt", "media", "data", "scratch", "workspace", "srv", "nfs")
CHUNK = 2**20  # bytes searched at once
# Sizes of GGUF's values in bytes, by type: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
GGUF_TEXT, GGUF_ARRAY = 8, 9


@dataclass(frozen=True)
class Publication:
    folder: Path
    card: Path  # uploaded as `README.md`, in place of the folder's
    form: HubForm
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
    """Raise `UserError` if a file for upload holds a path of this machine, a secret or code."""
    for path in [publication.card, *publication.files.values()]:
        for obstacle in obstacles(path):
            raise UserError(
                f"Nothing is published: {path} holds {obstacle}. Remove it and repeat the command; "
                "if it is the base model (adapter_config.json), name its hub id (export.base_id) "
                "and run again."
            )


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and path.name != CARD and not hidden:
            yield path


def card_text(publication: Publication) -> str:
    """Return the card, with the facts on the uploaded form for the hub and its readers."""
    text = publication.card.read_text(encoding="utf-8")
    if publication.form == "adapter":
        return text
    card, hub = ModelCard(text), EXPORTS[publication.form].hub
    card.data["library_name"] = hub.library
    if card.data.get("base_model") is not None:
        card.data["base_model_relation"] = hub.relation
    title, _, body = card.text.strip().partition("\n")
    remark = f"This repository holds {hub.model}. The rest of this card is of the run that made it."
    card.text = f"{title}\n\n{remark}\n{body}\n"
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
        reason = str(error.__cause__ or error).splitlines()
        raise setting_error(
            "export.hub_repo",
            publication.repo_id,
            f"the upload broke off ({reason[0] if reason else type(error).__name__}); nothing is "
            "visible there",
            "Repeat the command: large files that the hub has are not sent again",
        ) from error
    return str(done.commit_url)


def obstacles(path: Path, *, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield why a file must not be uploaded, in words. environment: its secrets are searched."""
    if path.suffix not in KINDS:
        yield f"a file of the kind {path.suffix}, which no loader of this model needs"
        return
    for key, text in () if path.name in VOCABULARIES else _texts(path):
        where = f" ({key})" if key else ""
        if key == BASE and not is_hub_id(text):
            yield f"{text} as the base model ({BASE}), which is no id of the hub"
        elif named := _machine_path(text, whole=bool(key)):
            yield f"{named}{where}, a path of this machine"
        if holds_secret(text):
            yield f"a password or token{where}"
    words = {folder: f"{folder}, a folder of this machine" for folder in private_folders()}
    words |= dict.fromkeys(secret_values(environment), "the value of a secret variable")
    yield from _words_in(path, words)


def private_folders() -> list[str]:
    """Return prefixes of this machine's paths: home folder, this one, temporary files."""
    folders = {str(Path.home()), str(Path.cwd()), tempfile.gettempdir()}
    return sorted(folder.rstrip(os.sep) for folder in folders if folder.strip(os.sep))


def _machine_path(text: str, *, whole: bool) -> str | None:
    """Return the first path of a machine in a text. whole: the text is one value."""
    if whole and OUTSIDE.fullmatch(text):
        return text
    roots = {*ROOTS, *(entry.name for entry in os.scandir("/") if entry.is_dir())}
    folders = "|".join(sorted(map(re.escape, roots)))
    inside = rf"(?<![\w.:/~<-])(?:file:/+|~[\w.-]*/|/(?:{folders})/)[^\s'\"`<>|{{}}()]+"
    match = re.search(inside, text)
    return match and match[0]


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the texts of a file with their keys; of one without keys the whole text."""
    if path.suffix in WEIGHTS:
        try:
            yield from _texts_of_weights(path)
        except (ValueError, struct.error, KeyError) as error:
            raise UserError(
                f"Nothing is published: {path} is not a whole {path.suffix[1:]} file ({error!r}). "
                "Delete its folder and run the workflow again."
            ) from None
    else:
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            yield from _values(json.loads(text))
        except (ValueError, RecursionError):
            yield "", text


def _texts_of_weights(path: Path) -> list[tuple[str, str]]:
    if path.suffix == ".safetensors":
        return [*_values(read_header(path)[0].get("__metadata__", {}))]
    with path.open("rb") as file:
        return [*_gguf_texts(file)]


def _values(content: Any, key: str = "value") -> Iterator[tuple[str, str]]:
    """Yield all texts of JSON with the nearest key, and all keys as texts."""
    if isinstance(content, str):
        yield key, content
    elif isinstance(content, dict):
        for name, value in content.items():
            yield "key", name
            yield from _values(value, name)
    elif isinstance(content, list):
        for value in content:
            yield from _values(value, key)


def _gguf_texts(file: BinaryIO) -> Iterator[tuple[str, str]]:
    """Yield GGUF's metadata that are texts, and move behind the metadata."""
    _, _, _, count = struct.unpack("<4sIQQ", file.read(24))
    for _ in range(count):
        key = _gguf_text(file)
        (kind,) = struct.unpack("<I", file.read(4))
        if kind == GGUF_TEXT:
            yield key, _gguf_text(file)
        elif kind == GGUF_ARRAY:
            _skip_gguf_array(file)
        else:
            file.seek(GGUF_SIZES[kind], os.SEEK_CUR)


def _gguf_text(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(length).decode("utf-8", errors="replace")


def _skip_gguf_array(file: BinaryIO) -> None:
    kind, count = struct.unpack("<IQ", file.read(12))
    if kind in GGUF_SIZES:
        file.seek(count * GGUF_SIZES[kind], os.SEEK_CUR)
        return
    for _ in range(count):
        if kind == GGUF_TEXT:
            _gguf_text(file)
        else:
            _skip_gguf_array(file)


def _searched_bytes(path: Path) -> int:
    """Return how many bytes of a file may hold texts."""
    if path.suffix == ".safetensors":
        return path.stat().st_size - read_header(path)[1]
    if path.suffix == ".gguf":
        with path.open("rb") as file:
            for _ in _gguf_texts(file):
                pass
            return file.tell()
    return path.stat().st_size


def _words_in(path: Path, words: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of the words that a file holds, plain or as JSON escapes them."""
    forms = {form.encode(): word for word in words for form in (word, json.dumps(word)[1:-1])}
    overlap = max((len(form) for form in forms), default=1) - 1
    present: set[str] = set()
    before, left = b"", _searched_bytes(path)
    with path.open("rb") as file:
        while left > 0 and (part := file.read(min(CHUNK, left))):
            left -= len(part)
            text = before + part
            present |= {word for form, word in forms.items() if form in text}
            before = text[-overlap:] if overlap else b""
    yield from sorted({words[word] for word in present})
