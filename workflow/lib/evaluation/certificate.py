"""A statement that others can check: hashes of a run's files, and measured numbers.

Its numbers are computed from files that it names, so `verify` computes them again. It holds no text
of the data and no path of this machine. Formats: in-toto Statement v1; if signed, a DSSE envelope
v1 with Ed25519."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from huggingface_hub import ModelCard
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from workflow.lib.artifacts.evaluation_record import ITEMS, Evaluation, Items, SubjectItems
from workflow.lib.artifacts.read_records import parsed, read_record
from workflow.lib.artifacts.records import PREDICATE, STATEMENT, Statement
from workflow.lib.data.reading.hub_download import licence_words
from workflow.lib.evaluation.task_scores import (
    by_source,
    difference_fields,
    estimate_ratio,
    loss_fields,
    paired_fields,
)
from workflow.lib.settings.evaluate import is_loss
from workflow.lib.settings.subjects import REFERENCES
from workflow.lib.system.artifact_files import read_artifact
from workflow.lib.system.checksums import HUB_RECORD, RecordedFile
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import file_sha256, provenance
from workflow.lib.system.input_files import why_unreadable
from workflow.lib.system.number_formats import some_of
from workflow.lib.system.redaction import public_name

PAYLOAD = "application/vnd.in-toto+json"
SAME = 1e-9  # relative: other processors may add in another order
# Certified fields of a file's record, by its name.
FACTS = {
    "source.json": "repo_id kind commit licence",
    "manifest.json": "seq_len sources train_heldout_overlap train_heldout_near_duplicates",
    "summary.json": "fingerprint num_steps trained_tokens final_loss device_name processes "
    "elapsed_s energy_j checks provenance",
    "parity.json": "passed rms_difference tolerance positions",
    "served.json": "server subject compute_dtype documents loss evaluated_loss trained_loss bound "
    "worst_document prompts answers equal_answers answer_gap parts",
    "gguf.json": "files",
}
OF_SOURCES = ("split", "sha256", "rows")  # a file's path may be one of this machine
NOT_CLEAN, DIRTY = 0.2, 0.8  # shares of an item's tokens, as in `task_overlap`'s source


def facts_of(paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return the certified fields of files, by their names."""
    found: dict[str, Any] = {}
    for name, path in paths.items():
        if path.name in FACTS:
            content = read_artifact(path)
            found[name] = {key: content.get(key) for key in FACTS[path.name].split()}
            if sources := found[name].get("sources"):
                found[name]["sources"] = [{k: of.get(k) for k in OF_SOURCES} for of in sources]
    return found


def statistics(items: Items, least: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of `Predicate` that follow from the items and the required gains: of each
    subject loss, scores and paired differences, in the fields of `Evaluation`."""
    how = {"resamples": items.resamples, "seed": items.seed}
    measured: dict[str, Any] = {}
    for position, (name, subject) in enumerate(items.subjects.items()):
        tasks: dict[str, Any] = {}
        for (task, metric), values in _values(subject).items():
            estimate = estimate_ratio(list(values.values()), [1.0] * len(values), **how)
            score = {"value": estimate.value, "value_ci95": estimate.ci95}
            tasks.setdefault(task, {"metrics": {}})["metrics"][metric] = score
        measured[name] = {
            "heldout": loss_fields(_losses(subject), **how) if subject.losses else None,
            "tasks": tasks,
            "comparisons": {
                other: _compared(before, subject, how)
                for other, before in list(items.subjects.items())[:position]
            },
        }
    known = [name for name in REFERENCES if name in measured and measured[name]["heldout"]]
    return {
        "measured": measured,
        "overlap": {task: _overlap(shares) for task, shares in items.overlap.items()},
        "required": {
            name: _required(name, bound, measured[items.served]["comparisons"][known[0]])
            for name, bound in least.items()
            if known
        },
    }


def _overlap(shares: list[float | None]) -> dict[str, int]:
    known = [share for share in shares if share is not None]
    return {
        "items": len(shares),
        "too_short": len(shares) - len(known),
        "not_clean": sum(share >= NOT_CLEAN for share in known),
        "dirty": sum(share >= DIRTY for share in known),
    }


def _required(name: str, least: float, compared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the judgement of a gain of loss by its interval; below 0: a margin of loss."""
    source = name.partition("/")[2]
    found = compared["sources"].get(source, {}) if source else compared
    gain, ends = found.get("loss_difference"), found.get("loss_difference_ci95")
    met = ends is not None and ends[0] >= least
    return {"gain": gain, "gain_ci95": ends, "met": met}


def _losses(subject: SubjectItems) -> list[tuple[float, int]]:
    return [(document.loss_sum, document.tokens) for document in subject.losses]


def _values(subject: SubjectItems) -> dict[tuple[str, str], dict[tuple[int, str, str], float]]:
    return {
        (found.task, found.metric): {(of[0], of[1], of[2]): of[3] for of in found.values}
        for found in subject.tasks
    }


def _compared(before: SubjectItems, after: SubjectItems, how: Mapping[str, int]) -> dict[str, Any]:
    pairs = list(zip(_losses(before), _losses(after), strict=True))
    sources = [document.source for document in after.losses]
    tasks: dict[str, Any] = {}
    old = _values(before)
    for (task, metric), values in _values(after).items():
        if (task, metric) in old:
            paired = paired_fields(old[task, metric], values, **how)
            tasks.setdefault(task, {})[metric] = paired
    return {
        **difference_fields(pairs, **how),
        "sources": {
            source: difference_fields(some, **how)
            for source, some in by_source(pairs, sources).items()
        },
        "tasks": tasks,
    }


def statement(
    run: str,
    files: Iterable[RecordedFile],
    *,
    certificate: Path,
    published: Path,
    evaluation: Path,
    licences: Mapping[str, str | None],
    require: Mapping[str, float],
) -> Statement:
    """Return the statement of a run. files: checked ones, those of `FACTS` and the items among
    them; certificate: the file to be written; require: of `evaluate`. Raises `UserError` if the
    evaluation does not follow from its items."""
    by_name = {file.path.as_posix(): file for file in files}
    least = {_public(name): gain for name, gain in require.items() if is_loss(name)}
    found = statistics(read_record(evaluation / ITEMS, Items), least)
    for subject, of_subject in found["measured"].items():
        path = evaluation / f"{subject}.json"
        recorded = read_record(path, Evaluation).model_dump(mode="json")
        if wrong := _first_other(recorded, of_subject, common=True):
            raise _not_following(path, wrong)
    return Statement.model_validate(
        {
            "_type": STATEMENT,
            "subject": [
                {"name": name, "digest": {"sha256": file.sha256}} for name, file in by_name.items()
            ],
            "predicateType": PREDICATE,
            "predicate": {
                "run": run,
                "certificate": certificate.as_posix(),
                "published": published.as_posix(),
                "facts": facts_of({name: file.path for name, file in by_name.items()}),
                "licences": licences,
                "require": least,
                **found,
                "provenance": provenance(),
            },
        }
    )


def _public(requirement: str) -> str:
    name, slash, source = requirement.partition("/")
    return f"{name}{slash}{public_name(source)}"


def licence_of(paths: Iterable[Path]) -> str | None:
    """Return the licences of files or folders, by a download's record or the card beside them."""
    folders = {path if path.is_dir() else path.parent for path in paths}
    return ", ".join(sorted({named for folder in folders if (named := _licence(folder))})) or None


def _licence(folder: Path) -> str | None:
    record = read_artifact(folder / HUB_RECORD) if (folder / HUB_RECORD).is_file() else {}
    if "licence" in record:  # not in that of a local model's copy
        return licence_words(record["licence"])
    card = folder / "README.md"
    said = ModelCard.load(card, ignore_metadata_errors=True).data if card.is_file() else {}
    return licence_words(said.get("license"))


def _not_following(path: Path, wrong: str) -> UserError:
    return UserError(
        f"{path}: {wrong}, which does not follow from the items ({ITEMS}). The files do not belong "
        "together: get the originals of all, or run evaluate_run and certify_run again."
    )


def _leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _leaves(part, f"{at}.{key}" if at else str(key))
    else:
        yield at, value


def _first_other(stated: Any, found: Any, *, common: bool = False) -> str | None:
    """Return the first stated value that was not found, in words; common: of those in both."""
    old, new = dict(_leaves(stated)), dict(_leaves(found))
    for name in [name for name in old if name in new] if common else old | new:
        stated, found = (leaves.get(name, "nothing") for leaves in (old, new))
        if not _same(stated, found):
            return f"{name} = {stated}, found {found}"
    return None


def _same(stated: Any, found: Any) -> bool:
    if isinstance(stated, float) and isinstance(found, float):
        return math.isclose(stated, found, rel_tol=SAME, abs_tol=SAME)
    return bool(stated == found)


def packed(said: Statement, key: Path | None) -> dict[str, Any]:
    """Return the statement as JSON, signed if there is a key."""
    content = said.as_json()
    if key is None:
        return content
    envelope = Envelope(json.dumps(content).encode(), PAYLOAD, {})
    envelope.sign(CryptoSigner(_key(key, of="private", setting="export.signing_key")))
    return dict(envelope.to_dict())


def _key(path: Path, *, of: Literal["private", "public"], setting: str) -> Any:
    """Read a key as `ssh-keygen` writes it, or in PEM."""
    data = path.read_bytes()
    form = "ssh" if b"OPENSSH" in data or data.startswith(b"ssh-") else "pem"
    try:
        load = getattr(serialization, f"load_{form}_{of}_key")
        return load(data, password=None) if of == "private" else load(data)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        change = "Name one of `ssh-keygen -t ed25519 -N ''`, or in PEM, without a passphrase"
        bound = f"it cannot be read as a {of} key ({error})"
        raise setting_error(setting, str(path), bound, change) from None


def opened(path: Path, signed_by: Path | None) -> tuple[Statement, str]:
    """Return a certificate's statement, and its signer in words. Raises `UserError` if the
    signature is not by the public key `signed_by`."""
    try:
        content = dict(json.loads(path.read_bytes()))
        envelope = Envelope.from_dict(content) if "payload" in content else None
        said = content if envelope is None else dict(json.loads(envelope.payload))
    except (OSError, ValueError, TypeError, KeyError) as error:
        bound = why_unreadable(path) or f"it is no certificate ({error!r})"
        raise setting_error("certificate", str(path), bound, "Name a certificate.json") from None
    signer = "not signed"
    if signed_by is not None:
        key = SSlibKey.from_crypto(_key(signed_by, of="public", setting="signed_by"))
        try:
            (envelope or Envelope(b"", PAYLOAD, {})).verify([key], threshold=1)
        except VerificationError:
            raise UserError(
                f"{path} is not signed by {signed_by}. Check that signed_by is its signer's "
                "public key; otherwise do not trust it."
            ) from None
        signer = f"signed by {signed_by}"
    elif envelope is not None:
        signer = f"signed by {', '.join(envelope.signatures)}, not checked (signed_by)"
    return parsed(said, Statement, where=str(path)), signer


class Verified(NamedTuple):
    """A valid certificate: its statement, its signer, files that are not here."""

    said: Statement
    signer: str
    absent: list[str]


def verify(certificate: Path, *, signed_by: Path | None) -> Verified:
    """Check files and numbers against a certificate. Files are searched beside it, under their
    published names, and in the run's folders. Raises `UserError` naming the first difference."""
    said, signer = opened(certificate, signed_by)
    paths = {file.name: _located(file.name, said, certificate) for file in said.subject}
    here = {name: path for name, path in paths.items() if path is not None}
    digests = {file.name: file.digest["sha256"] for file in said.subject}
    if wrong := [name for name in here if file_sha256(here[name]) != digests[name]]:
        raise UserError(
            f"{certificate}: not the files that were certified: {some_of(wrong)}. Get the original "
            "files, or certify these anew."
        )
    items = next((path for name, path in here.items() if Path(name).name == ITEMS), None)
    if items is None:
        raise UserError(
            f"{certificate}: {ITEMS} is not here, so no number can be checked. Put it beside the "
            "certificate."
        )
    stated = said.predicate.model_dump(mode="json", include={"measured", "overlap", "required"})
    found = statistics(read_record(items, Items), said.predicate.require)
    if other := _first_other(stated, found):
        raise _not_following(certificate, other)
    certified = {
        name: facts for name, facts in said.predicate.facts.items() if paths.get(name, True)
    }
    if other := _first_other(certified, facts_of(here)):
        raise UserError(
            f"{certificate}: {other} in the file itself. The certificate was changed, or is of "
            "another run: get the original one."
        )
    return Verified(said, signer, sorted(paths.keys() - here.keys()))


def _located(name: str, said: Statement, certificate: Path) -> Path | None:
    """Return the path of a certified file, or None: beside the certificate, under its published
    name, or in the folders of the run, if the certificate lies there."""
    path, published = Path(name), Path(said.predicate.published)
    places = []
    if path.is_relative_to(published):
        places = [certificate.parent / path.relative_to(published)]
    elif path.name == ITEMS:
        places = [certificate.parent / ITEMS]
    made, root = Path(said.predicate.certificate), certificate.absolute()
    if root.parts[-len(made.parts) :] == made.parts:
        places.append(root.parents[len(made.parts) - 1] / path)
    return next((place for place in places if place.is_file()), None)
