"""The scores folder: shards of `.npy` files, mapped, and a manifest; without torch.

Scores are of the trained tokens of packed rows, in the order of (row, position), and of those of
the held-out documents one after the other. log_probs: log p of each token. Of a teacher also
top_ids and top_log_probs (tokens, k), its likeliest tokens, and rest, the log of the mass of all
others (-inf without others). A shard has a file for each array, `<split>-<number>.<array>.npy`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import ScoresManifest, Split
from workflow.lib.data.tokens.token_store import ARRAYS, TokenStore, map_array
from workflow.lib.system.checksums import RecordedFile, damaged
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import short_hash

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


class _ScoredSplit:
    """The scores of one split, by its rows or documents."""

    def __init__(
        self,
        starts: npt.NDArray[np.int64],
        firsts: npt.NDArray[np.int64],
        shards: list[Scores],
        nothing: Scores,
    ) -> None:
        """starts: (items + 1,), each one's first token; firsts: each shard's first item."""
        self._starts, self._firsts, self._shards = starts, firsts, shards
        self._nothing = nothing

    def of(self, items: Iterable[int]) -> Scores:
        return Scores.joined([self._nothing, *map(self._item_scores, items)])

    def _item_scores(self, item: int) -> Scores:
        if not 0 <= item < len(self._starts) - 1:
            raise IndexError(f"item {item} of {len(self._starts) - 1}")
        number = int(np.searchsorted(self._firsts, item, side="right")) - 1
        start, stop = self._starts[item : item + 2] - self._starts[self._firsts[number]]
        return self._shards[number].between(start, stop)


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
