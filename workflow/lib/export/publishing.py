"""Upload of exported files to a repository of the Hugging Face hub, after a check of what would
become public.

A repeated upload resumes: the hub keeps received large files, and does not get them again."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError

from workflow.lib.artifacts.records import Parity
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.data.reading.hub_download import TransportError
from workflow.lib.export.publication_checks import obstacles
from workflow.lib.settings.forms import EXPORTS, HubForm
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import write_text

CARD = "README.md"


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
