"""The scores folder: shards of `.npy` files, mapped, and a manifest; without torch.

Scores are of the trained tokens of packed rows, in the order of (row, position), and of those of
the held-out documents one after the other. log_probs: log p of each token. Of a teacher also
top_ids and top_log_probs (tokens, k), its likeliest tokens, and rest, the log of the mass of all
others (-inf without others). A shard has a file for each array, `<split>-<number>.<array>.npy`.

Shards lie in a folder beside the output until all are finished, so that a killed stage resumes at a
shard; its record, written after its files, marks it as finished. The manifest is written last, and
the folder gets its name."""

import itertools
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Provenance, ScoreShard, ScoresManifest, Split
from workflow.lib.data.tokens.token_store import ARRAYS, TokenStore, map_array
from workflow.lib.data.tokens.work_folder import BEGUN_WITH, begin_shards
from workflow.lib.system.checksums import RecordedFile, damaged
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import (
    atomic_path,
    file_sha256,
    replace_folder,
    short_hash,
    write_checked_json,
)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SPLITS: tuple[Split, ...] = ("train", "heldout")


class Scores(NamedTuple):
    """Scores of n tokens in order; the last three are a teacher's, None of any other model."""

    log_probs: npt.NDArray[np.float32]  # (n,)
    top_ids: npt.NDArray[np.uint32] | None = None  # (n, k), the likeliest first
    top_log_probs: npt.NDArray[np.float32] | None = None  # (n, k)
    rest: npt.NDArray[np.float32] | None = None  # (n,)

    def between(self, start: int, stop: int) -> "Scores":
        arrays: list[Any] = [None if array is None else array[start:stop] for array in self]
        return Scores(*arrays)

    def outcomes(self) -> npt.NDArray[np.float32]:
        """Return log p (n, k + 1) of a teacher's likeliest tokens, and of all others together."""
        assert self.top_log_probs is not None, "the scores are a teacher's"
        assert self.rest is not None
        return np.concatenate([self.top_log_probs, self.rest[:, None]], axis=1)

    @classmethod
    def nothing(cls, top_k: int) -> Self:
        layout = arrays_of(top_k).items()
        return cls(**{name: np.empty((0, *more), dtype) for name, (dtype, more) in layout})

    @classmethod
    def joined(cls, parts: Sequence["Scores"]) -> Self:
        """Return the concatenation of at least one part."""
        arrays: list[Any] = [
            None if of[0] is None else np.concatenate(of) for of in zip(*parts, strict=True)
        ]
        return cls(*arrays)


def arrays_of(top_k: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the arrays of a folder, each with its dtype on disk and its shape after the tokens."""
    if not top_k:
        return {"log_probs": ("<f4", ())}
    return {
        "log_probs": ("<f4", ()),
        "top_ids": ("<u4", (top_k,)),
        "top_log_probs": ("<f4", (top_k,)),
        "rest": ("<f4", ()),
    }


def file_name(split: Split, number: int, array: str) -> str:
    return f"{split}-{number:05d}.{array}.npy"


def tokens_hash(manifest: dict[str, Any]) -> str:
    """Return a hash of all of a tokens folder that its scores depend on, by its manifest."""
    return short_hash([[name, manifest["files"][name]] for name in sorted(ARRAYS)])


def trained_counts(tokens: TokenStore, split: Split) -> npt.NDArray[np.int64]:
    """Return the trained tokens of each row or held-out document."""
    if split == "train":
        return tokens.trained_tokens_per_row.astype(np.int64)
    counts = [int(mask.sum()) for _, mask in tokens.heldout_documents()]
    return np.asarray(counts, dtype=np.int64)


class ScoreStore:
    """A scores folder opened for reading; arrays are read from disk at each access."""

    def __init__(self, manifest: ScoresManifest, splits: dict[Split, "_ScoredSplit"]) -> None:
        self.manifest = manifest
        self._splits = splits

    @classmethod
    def open(cls, folder: Path, *, tokens: TokenStore, top_k: int = 0) -> "ScoreStore":
        """Map the scores in `folder`, of these tokens, after checks of types, shapes and sizes.
        Raises `UserError` if they are of other tokens or have another k, or if the folder is not
        finished or damaged."""
        manifest = read_manifest(folder)
        if manifest.tokens != tokens_hash(tokens.manifest):
            raise UserError(
                f"The scores in {folder} are of other tokens ({manifest.tokens}) than those that "
                f"are trained on ({tokens_hash(tokens.manifest)}). {manifest.advice}"
            )
        if manifest.top_k != top_k:
            raise UserError(
                f"The scores in {folder} have the {manifest.top_k} likeliest tokens of each "
                f"position, and {top_k} are wanted (distill.top_k). {manifest.advice}"
            )
        return cls(manifest, {split: _opened(folder, manifest, split, tokens) for split in SPLITS})

    def for_rows(self, indices: Iterable[int]) -> Scores:
        """Return the scores of the trained tokens of these training rows, in this order."""
        return self._splits["train"].of(indices)

    def heldout(self, number: int) -> Scores:
        return self._splits["heldout"].of([number])


def read_manifest(folder: Path) -> ScoresManifest:
    """Read a scores folder's manifest; raises `UserError` if it is absent, damaged or old."""
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} holds no {MANIFEST}: it is no finished folder of scores. Delete it if it "
            "exists, and repeat the command; score_tokens makes it."
        )
    manifest = read_record(folder / MANIFEST, ScoresManifest)
    if manifest.format_version != FORMAT_VERSION:
        raise UserError(
            f"{folder / MANIFEST}: format_version = {manifest.format_version}, but this version of "
            f"the workflow reads {FORMAT_VERSION}. {manifest.advice}"
        )
    return manifest


def recorded_scores(folder: Path) -> list[RecordedFile]:
    """Return a scores folder's files with their SHA-256; raises as `read_manifest`."""
    numbers = dict.fromkeys(SPLITS, 0)
    recorded = []
    for shard in read_manifest(folder).shards:
        for array, sha256 in shard.files.items():
            name = file_name(shard.split, numbers[shard.split], array)
            recorded.append(RecordedFile(folder, name, sha256))
        numbers[shard.split] += 1
    return recorded


class _ScoredSplit(NamedTuple):
    """The scores of one split, by its rows or documents."""

    starts: npt.NDArray[np.int64]  # (items + 1,), each one's first token
    firsts: npt.NDArray[np.int64]  # each shard's first item
    shards: list[Scores]
    nothing: Scores

    def of(self, items: Iterable[int]) -> Scores:
        return Scores.joined([self.nothing, *map(self._item_scores, items)])

    def _item_scores(self, item: int) -> Scores:
        if not 0 <= item < len(self.starts) - 1:
            raise IndexError(f"item {item} of {len(self.starts) - 1}")
        number = int(np.searchsorted(self.firsts, item, side="right")) - 1
        start, stop = self.starts[item : item + 2] - self.starts[self.firsts[number]]
        return self.shards[number].between(start, stop)


def _opened(
    folder: Path, manifest: ScoresManifest, split: Split, tokens: TokenStore
) -> _ScoredSplit:
    shards = [shard for shard in manifest.shards if shard.split == split]
    counts = trained_counts(tokens, split)
    starts = np.concatenate([[0], np.cumsum(counts)])
    edges = np.cumsum([0, *(shard.count for shard in shards)])
    whole = edges[-1] == len(counts) and [s.first for s in shards] == edges[:-1].tolist()
    counted = [starts[s.first + s.count] - starts[s.first] for s in shards] if whole else []
    if not whole or counted != [shard.tokens for shard in shards]:
        raise damaged(folder, MANIFEST, f"does not name all scores of {split}")
    layout = arrays_of(manifest.top_k)
    mapped = [
        Scores(
            **{
                array: map_array(folder / file_name(split, number, array), dtype, (s.tokens, *more))
                for array, (dtype, more) in layout.items()
            }
        )
        for number, s in enumerate(shards)
    ]
    return _ScoredSplit(starts, edges[:-1], mapped, Scores.nothing(manifest.top_k))


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
