"""A run's training inputs by content: data or weights that were edited in place count as others."""

from pathlib import Path

from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import ScoresManifest
from workflow.lib.data.tokens.token_store import MANIFEST
from workflow.lib.model.architecture.model_files import ADAPTER_WEIGHTS
from workflow.lib.system.artifact_files import read_artifact
from workflow.lib.system.checksums import damaged, listed_files
from workflow.lib.system.files import file_sha256, short_hash


def trained_content(
    manifest: Path, base: Path, *, start: Path | None = None, scores: Path | None = None
) -> str:
    """Return a short hash of the training tokens, of the base's weights and config, and, if a run
    has them, of its start adapter's weights and of its scores. Raises `UserError` if a record is
    damaged."""
    tokens = read_artifact(manifest).get("files")
    if not isinstance(tokens, dict):
        raise damaged(manifest.parent, manifest.name, "lacks checksums")
    shards = () if scores is None else read_record(scores / MANIFEST, ScoresManifest).shards
    return short_hash(
        [
            *([name, sha] for name, sha in tokens.items() if name.startswith("train.")),
            *(
                f"{f.sha256}  {f.name}"
                for f in listed_files(base)
                if f.name == "config.json" or f.name.endswith(".safetensors")
            ),
            *([] if start is None else [file_sha256(start / ADAPTER_WEIGHTS)]),
            *(shard.files for shard in shards if shard.split == "train"),
        ]
    )


def check_records(tokens: Path, base: Path) -> None:
    """Raise `UserError` if existing records of the folders are damaged."""
    if (tokens / MANIFEST).exists():
        read_artifact(tokens / MANIFEST)
    if base.exists():
        listed_files(base)
