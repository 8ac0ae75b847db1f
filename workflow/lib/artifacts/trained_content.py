"""What a run's training reads, by content: one digest of each input, and their key.

Data or weights that were edited in place count as others. An input decides the exported adapter, or
the adapter is only measured by it: held-out data decide if the run chooses by their losses
(`TrainConfig.chooses_by_heldout`)."""

from pathlib import Path
from typing import Any, NamedTuple

from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import ScoresManifest
from workflow.lib.checkpoints.files.model_files import ADAPTER_WEIGHTS
from workflow.lib.data.tokens.token_store import MANIFEST
from workflow.lib.system.checksums import damaged, listed_files, read_artifact
from workflow.lib.system.files import file_sha256, short_hash

HELDOUT = ("held-out tokens", "scores of held-out tokens")


class InputDigests(NamedTuple):
    """Digests of a training's inputs, by name."""

    deciding: dict[str, str]
    """Of the inputs that decide the exported adapter."""
    measuring: dict[str, str]
    """Of the inputs that only its held-out losses depend on."""

    def changed(self, earlier: dict[str, str]) -> list[str]:
        """Return the names of deciding inputs with another digest than `earlier`."""
        return [name for name, digest in self.deciding.items() if earlier.get(name) != digest]

    def measured_otherwise(self, earlier: dict[str, str]) -> bool:
        """Return whether held-out losses from then are of other data."""
        return any(earlier.get(name) != digest for name, digest in self.measuring.items())


NO_INPUTS = InputDigests({}, {})


def input_digests(
    manifest: Path,
    base: Path,
    *,
    start: Path | None = None,
    scores: Path | None = None,
    chooses_by_heldout: bool = True,
) -> InputDigests:
    """Return the digests of the tokens, of the base's weights and config, and, if a run has them,
    of its start adapter's weights and of its scores. Raises `UserError` for damaged records."""
    tokens = read_artifact(manifest).get("files")
    if not isinstance(tokens, dict):
        raise damaged(manifest.parent, manifest.name, "lacks checksums")
    shards = () if scores is None else read_record(scores / MANIFEST, ScoresManifest).shards
    base_files = [
        [f.name, f.sha256]
        for f in listed_files(base)
        if f.name == "config.json" or f.name.endswith(".safetensors")
    ]
    contents = {
        "training tokens": [item for item in tokens.items() if item[0].startswith("train.")],
        "held-out tokens": [item for item in tokens.items() if item[0].startswith("heldout.")],
        "base": base_files,
        "start adapter": None if start is None else file_sha256(start / ADAPTER_WEIGHTS),
        "scores of training tokens": [s.files for s in shards if s.split == "train"],
        "scores of held-out tokens": [s.files for s in shards if s.split == "heldout"],
    }
    digests = {name: short_hash(content) for name, content in contents.items() if content}
    measuring = () if chooses_by_heldout else HELDOUT
    return InputDigests(
        {name: digest for name, digest in digests.items() if name not in measuring},
        {name: digest for name, digest in digests.items() if name in measuring},
    )


def trained_content(manifest: Path, base: Path, **options: Any) -> str:
    """Return the key of the deciding inputs; arguments and errors as of `input_digests`."""
    return short_hash(input_digests(manifest, base, **options).deciding)


def check_records(tokens: Path, base: Path) -> None:
    """Raise `UserError` if existing records of the folders are damaged."""
    if (tokens / MANIFEST).exists():
        read_artifact(tokens / MANIFEST)
    if base.exists():
        listed_files(base)
