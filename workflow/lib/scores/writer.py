"""Writing of scores, shard by shard, so that a killed stage resumes at a shard.

Shards lie in a folder beside the output until all are finished; a shard's record, written after its
files, marks it as finished. The manifest is written last, and the folder gets its name."""

import itertools
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Provenance, ScoreShard, ScoresManifest, Split
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.data.tokens.work_folder import BEGUN_WITH, begin_shards
from workflow.lib.scores.store import (
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    Scores,
    arrays_of,
    file_name,
    tokens_hash,
    trained_counts,
)
from workflow.lib.system.checksums import RecordedFile
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import (
    atomic_path,
    file_sha256,
    replace_folder,
    short_hash,
    write_checked_json,
)

SHARD_TOKENS = 2**18  # of rows, trained or not: seconds to minutes of work


@dataclass(frozen=True)
class Part:
    """The content of a shard: `count` items from `first` on, and their trained tokens."""

    split: Split
    number: int  # among the shards of the split
    first: int
    count: int
    tokens: int


def parts_of(tokens: TokenStore, *, shard_tokens: int) -> list[Part]:
    """Divide training rows and held-out documents into shards of about `shard_tokens` tokens."""
    lengths = {
        "train": np.full(tokens.num_rows, tokens.seq_len),
        "heldout": np.asarray([len(ids) for ids, _ in tokens.heldout_documents()], dtype=np.int64),
    }
    parts: list[Part] = []
    for split in SPLITS:
        trained = trained_counts(tokens, split)
        shards = np.cumsum(lengths[split]) - 1  # by the position of an item's last token
        _, firsts = np.unique(shards // shard_tokens, return_index=True)
        edges = [*firsts.tolist(), len(shards)]
        for number, (first, end) in enumerate(itertools.pairwise(edges)):
            count = int(trained[first:end].sum())
            parts.append(Part(split, number, first, end - first, count))
    return parts


class ScoreWriter:
    """Writes the folder `output`; keeps finished shards with equal `facts`."""

    def __init__(
        self,
        output: Path,
        facts: dict[str, Any],
        tokens: TokenStore,
        *,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        """facts: fields of `ScoresManifest` that the scores depend on."""
        self._output = output
        self._folder = output.with_name(f".{output.name}.partial")
        self._facts = facts | {"tokens": tokens_hash(tokens.manifest)}
        self.parts = parts_of(tokens, shard_tokens=shard_tokens)
        self.top_k: int = facts["top_k"]
        self._layout = arrays_of(self.top_k)

    def prepare(self) -> list[Part]:
        """Make the shards' folder; return the parts to score, or raise `UserError` for space."""
        begun_with = short_hash([self._facts, [vars(part) for part in self.parts]])
        begin_shards(self._folder, key=begun_with)
        pending = [part for part in self.parts if self._finished(part) is None]
        self._check_disk(sum(part.tokens for part in pending))
        return pending

    def _check_disk(self, tokens: int) -> None:
        """Raise `UserError` if the scores of so many tokens do not fit on the disk."""
        token_bytes = sum(4 * math.prod(more) for _, more in self._layout.values())
        needed, free = tokens * token_bytes, shutil.disk_usage(self._folder).free
        if needed > free:
            raise UserError(
                f"scores of {tokens} trained tokens take {needed / 2**30:.1f} GiB ({token_bytes} "
                f"bytes each), and {free / 2**30:.1f} GiB are free on the disk of {self._output}. "
                "Free the difference, or lower distill.top_k."
            )

    def add(self, part: Part, scores: Scores) -> None:
        """Write a shard. Raises `UserError` if a score is no number."""
        if not np.isfinite(scores.log_probs).all():
            raise UserError(
                f"{self._facts['model']} gives log-probabilities that are not finite (in "
                f"{self._facts['compute_dtype']}). Is the model whole? A float16 model may need "
                "model.compute_dtype: float32."
            )
        files = {}
        for array, (dtype, more) in self._layout.items():
            values = np.asarray(getattr(scores, array), dtype=dtype)
            assert values.shape == (part.tokens, *more), f"{array} of another number of tokens"
            path = self._folder / file_name(part.split, part.number, array)
            with atomic_path(path) as temporary, temporary.open("wb") as file:
                np.save(file, values)
            files[array] = file_sha256(path)
        shard = ScoreShard(
            split=part.split, first=part.first, count=part.count, tokens=part.tokens, files=files
        )
        write_checked_json(self._record(part), shard.as_json())

    def finish(self) -> ScoresManifest:
        """Write the manifest and rename the folder, after all shards."""
        shards = list(self._shards())
        train = [part for part in self.parts if part.split == "train"]
        files = (self._folder / file_name("train", part.number, "log_probs") for part in train)
        sums = [float(np.load(file, allow_pickle=False).sum(dtype=float)) for file in files]
        trained = sum(part.tokens for part in train)
        manifest = ScoresManifest.model_validate(
            {
                **self._facts,
                "format_version": FORMAT_VERSION,
                "mean_log_prob": sum(sums) / trained if trained else None,
                "shards": tuple(shards),
                "provenance": Provenance.now(),
            }
        )
        for part in self.parts:
            self._record(part).unlink()
        (self._folder / BEGUN_WITH).unlink()
        write_checked_json(self._folder / MANIFEST, manifest.as_json())
        replace_folder(self._folder, self._output)
        return manifest

    def _shards(self) -> Iterator[ScoreShard]:
        for part in self.parts:
            shard = self._finished(part)
            assert shard is not None, f"{part} is not scored"
            yield shard

    def _finished(self, part: Part) -> ScoreShard | None:
        """Return the record of a shard that exists and is whole."""
        try:
            shard = read_record(self._record(part), ScoreShard)
        except UserError:
            return None
        names = {array: file_name(part.split, part.number, array) for array in self._layout}
        if shard.files.keys() != names.keys():
            return None
        files = [RecordedFile(self._folder, names[a], sha) for a, sha in shard.files.items()]
        return None if any(file.finding() for file in files) else shard

    def _record(self, part: Part) -> Path:
        return self._folder / f"{part.split}-{part.number:05d}.json"
