"""Uploading what was exported to a repository of the Hugging Face hub, after a look at what would
become public.

A repeated upload goes on: the hub has the large files that it was sent, and is not sent them again.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError

from workflow.lib.artifacts.parity_record import Parity
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.data.reading.hub_download import TransportError
from workflow.lib.export.private_paths import named_paths
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import write_text

Form = Literal["adapter", "merged", "gguf"]
# The hub's word for how it was made of its base, the library that loads it, and what it is.
FORMS: dict[Form, tuple[str, str, str]] = {
    "merged": (
        "finetune",
        "transformers",
        "the merged model: base and adapter in one, bfloat16",
    ),
    "gguf": ("quantized", "gguf", "GGUF files, for llama.cpp and Ollama"),
}
CARD = "README.md"


@dataclass(frozen=True)
class Publication:
    folder: Path
    card: Path
    """It becomes `README.md`, in place of one in the folder."""
    form: Form
    repo_id: str
    private: bool


def refuse_failed(summary: Summary, parity: Parity) -> None:
    """Raise `UserError` if a check of the training or of the export did not pass."""
    failed = [check.name for check in summary.checks if not check.passed]
    if not parity.passed:
        failed.append("the exported adapter gives the logits of the trained one")
    if failed:
        raise UserError(
            f"Nothing is published: a check failed ({'; '.join(failed)}). The report tells more."
        )


def refuse_private(publication: Publication) -> None:
    """Raise `UserError` if a file to be uploaded names a path of this machine (`private_paths`)."""
    for path in [publication.card, *_files(publication.folder)]:
        for named in named_paths(path):
            raise UserError(
                f"Nothing is published: {path} names {named}. If it is the base model "
                "(adapter_config.json), name its hub id (export.base_id) and run again."
            )


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != CARD and not path.name.startswith("."):
            yield path


def card_text(publication: Publication) -> str:
    """Return the card, with what the hub and its readers are told of the form that is uploaded."""
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
    Raises `UserError` with what the hub says if it refuses, and if the upload breaks off."""
    api = HfApi()
    names: Sequence[str] = [path.name for path in _files(publication.folder)]
    try:
        api.create_repo(publication.repo_id, private=publication.private, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            staged = Path(temporary)
            for name in names:
                (staged / name).symlink_to((publication.folder / name).resolve())
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
    except (TransportError, RuntimeError, OSError) as error:  # RuntimeError: of one large file
        said = str(error.__cause__ or error).splitlines()
        raise setting_error(
            "export.hub_repo",
            publication.repo_id,
            f"the upload broke off ({said[0] if said else type(error).__name__}); nothing is "
            "visible there",
            "Repeat the command: large files that the hub has are not sent again",
        ) from error
    return str(done.commit_url)
