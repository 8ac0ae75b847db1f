"""The tokens folder: little-endian `.npy` files and a manifest, mapped, without torch.

A training row holds whole documents one after the other; `position_ids` starts again at 0 with each
of them, so a row needs no attention mask. The padding tail is one more document that trains
nothing. `loss_mask[i]` says that token i is a prediction target, predicted from token i - 1 of the
same document: it is never True where `position_ids` is 0. `weights`, if present, are the tokens' in
the loss, 0 where `loss_mask` is False. Held-out documents are concatenated, unpacked, and cut by
offsets.

If the manifest says that the examples are `pairs` or `rated`, an example is two neighbouring
documents of one row, the first of them at an even place: a chosen and a rejected answer to one
prompt; or a rated answer, and the same prompt with the answer of another row. Both hold the prompt.
`desirable`, of rated answers alone, is True on all tokens of an example with a good answer.

The examples `groups` are answers of a model to one prompt, each a document that holds the prompt,
neighbours in a row; a group that is too long for a row continues in another. `advantages` is the
answer's on all tokens of its document; `sampled_log_probs` the sampler's log p of trained tokens.
The held-out documents are texts."""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal, NamedTuple, get_args, overload

import numpy as np
import numpy.typing as npt

from workflow.lib.settings.objectives import PAIRED, Examples
from workflow.lib.system.checksums import RecordedFile, damaged
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import is_passing, read_checked_json

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
REJECTS = "rejects.jsonl"
TRUNCATED = "truncated.jsonl"

# Every array of the folder and its type on disk; the shapes follow from the manifest (`_shapes`).
POSITIONS = "train.position_ids.npy"
ARRAYS: dict[str, npt.DTypeLike] = {
    "train.input_ids.npy": "<u4",
    "train.loss_mask.npy": "|b1",
    POSITIONS: "<i4",
    "heldout.input_ids.npy": "<u4",
    "heldout.loss_mask.npy": "|b1",
    "heldout.offsets.npy": "<i8",
}


class OptionalArray(NamedTuple):
    """Numbers of all tokens in folders of some examples."""

    dtype: npt.DTypeLike
    examples: Examples
    splits: tuple[str, ...] = ("train", "heldout")
    required: bool = True
    """Whether all folders of these examples have it."""
    per: Literal["token", "example"] = "token"
    """Its numbers in a micro-batch: of each trained token, or of each example."""


OPTIONAL: Mapping[str, OptionalArray] = {
    # Of splits with a token whose weight is neither 0 nor 1.
    "weights": OptionalArray("<f4", "texts", required=False),
    "desirable": OptionalArray("|b1", "rated", per="example"),
    "advantages": OptionalArray("<f4", "groups", splits=("train",)),
    "sampled_log_probs": OptionalArray("<f4", "groups", splits=("train",)),
}


def optional_files(name: str) -> tuple[str, ...]:
    """Return the files of an optional array, of both splits."""
    return tuple(f"{split}.{name}.npy" for split in OPTIONAL[name].splits)


WEIGHTS, DESIRABLE = map(optional_files, ("weights", "desirable"))
OPTIONAL_ARRAYS: dict[str, npt.DTypeLike] = {
    file: array.dtype for name, array in OPTIONAL.items() for file in optional_files(name)
}
CHUNK_TOKENS = 2**24  # mask entries (bytes) read at a time for the sum of a whole array

Array = npt.NDArray[Any]
Document = tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]


class HeldoutDocuments(Sequence[Document]):
    """The held-out documents in order, each as (token ids, loss mask), both of shape (length,)."""

    def __init__(self, *, ids: Array, mask: Array, offsets: Array) -> None:
        self._ids, self._mask, self._offsets = ids, mask, offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number = index % len(self)
        span = slice(int(self._offsets[number]), int(self._offsets[number + 1]))
        return self._ids[span], self._mask[span]


class TokenStore:
    """A tokens folder opened for reading; arrays are read from disk at each access. Attributes:
    `manifest`; `examples`; `num_rows`; `seq_len`, tokens; `input_ids` uint32, `loss_mask` bool and
    `position_ids` int32, the training arrays, each of shape (num_rows, seq_len); `optional`, those
    of `OPTIONAL` that are there, by name; `weights`, None if all are 0 or 1; `desirable`, None but
    for rated answers."""

    def __init__(self, *, manifest: dict[str, Any], arrays: dict[str, Array]) -> None:
        self.manifest = manifest
        self.examples: Examples = manifest.get("examples", "texts")
        self.input_ids = arrays["train.input_ids.npy"]
        self.loss_mask = arrays["train.loss_mask.npy"]
        self.position_ids = arrays[POSITIONS]
        files = {name: f"train.{name}.npy" for name in OPTIONAL}
        self.optional = {name: arrays[file] for name, file in files.items() if file in arrays}
        self._heldout_weights, self._heldout_desirable = map(arrays.get, (WEIGHTS[1], DESIRABLE[1]))
        self.num_rows, self.seq_len = self.input_ids.shape
        self.scores: Any = None  # a `scores.store.ScoreStore` of these tokens
        self._offsets = arrays["heldout.offsets.npy"]
        self._heldout = HeldoutDocuments(
            ids=arrays["heldout.input_ids.npy"],
            mask=arrays["heldout.loss_mask.npy"],
            offsets=self._offsets,
        )

    @classmethod
    def open(cls, path: Path) -> "TokenStore":
        """Map the arrays of the folder `path`, after checks of version, types, shapes and sizes.
        Raises `UserError` if the folder is missing, of another format version, or damaged."""
        manifest = _read_manifest(path)
        shapes = _shapes(path, manifest)
        _check_examples(path, manifest)
        return cls(
            manifest=manifest,
            arrays={
                name: map_array(path / name, (ARRAYS | OPTIONAL_ARRAYS)[name], shape)
                for name, shape in shapes.items()
            },
        )

    @cached_property
    def trained_tokens_per_row(self) -> npt.NDArray[np.int32]:
        """Prediction targets of each training row, shape (num_rows,), read at the first access."""
        return self._sums(self.loss_mask, np.int32)

    @cached_property
    def weights_per_row(self) -> npt.NDArray[Any]:
        """The sum of the weights of each training row, shape (num_rows,), read at the first access;
        its prediction targets if all weights are 0 or 1."""
        if self.weights is None:
            return self.trained_tokens_per_row
        return self._sums(self.weights, np.float64)

    def _sums(self, array: Array, dtype: type[np.generic]) -> npt.NDArray[Any]:
        sums = np.empty(self.num_rows, dtype=dtype)
        step = max(1, CHUNK_TOKENS // self.seq_len)
        for first in range(0, self.num_rows, step):
            rows = slice(first, first + step)
            sums[rows] = array[rows].sum(axis=1, dtype=dtype)
        return sums

    def heldout_documents(self) -> Sequence[Document]:
        return self._heldout

    def with_scores(self, scores: Any) -> "TokenStore":
        """Return the same tokens with a model's log-probabilities (`scores.store.ScoreStore`)."""
        scored = copy(self)
        scored.scores = scores
        return scored

    @property
    def weights(self) -> Array | None:
        return self.optional.get("weights")

    @property
    def desirable(self) -> Array | None:
        return self.optional.get("desirable")

    @property
    def heldout_desirable(self) -> npt.NDArray[np.bool_] | None:
        """Whether each held-out document's example has a good answer, shape (documents,); None but
        for rated answers."""
        every = self._heldout_desirable
        return None if every is None else np.asarray(every[self._offsets[:-1]])

    @property
    def heldout_is_weighted(self) -> bool:
        """Whether a held-out token's weight is neither 0 nor 1."""
        return self._heldout_weights is not None

    def heldout_weights(self, number: int) -> npt.NDArray[np.float64]:
        """Return the weights of a held-out document's trained tokens (trained,) in the loss."""
        span = slice(*(int(x) for x in self._offsets[number : number + 2]))
        trained = self._heldout[number][1]
        if self._heldout_weights is None:
            return np.ones(int(trained.sum()))
        return np.asarray(self._heldout_weights[span][trained], dtype=np.float64)

    def heldout_sources(self) -> list[str]:
        """Return the name of the source of each held-out document, from the manifest."""
        parts = self.manifest["splits"]["heldout"]["sources"]
        return [part["source"] for part in parts for _ in range(part["documents"])]

    @property
    def num_heldout_documents(self) -> int:
        return len(self._heldout)


def _read_manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"{path} holds no {MANIFEST}: it is no finished tokens folder. Delete it if it exists, "
            "and run the workflow again; tokenize_dataset writes it."
        )
    try:
        manifest = read_checked_json(path / MANIFEST)
        version = manifest["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, MANIFEST, f"cannot be read ({error!r})") from None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path / MANIFEST}: format_version = {version!r}, but this version of the workflow "
            f"reads {FORMAT_VERSION}. Delete the folder {path} and run the workflow again."
        )
    return manifest


def array_names(manifest: dict[str, Any]) -> list[str]:
    """Return the files of the arrays that a manifest names."""
    return [*ARRAYS, *(name for name in OPTIONAL_ARRAYS if name in manifest["files"])]


def recorded_arrays(path: Path, manifest: dict[str, Any]) -> list[RecordedFile]:
    """Return the arrays of the tokens folder `path`, with the SHA-256 in its manifest."""
    try:
        return [RecordedFile(path, name, manifest["files"][name]) for name in array_names(manifest)]
    except (KeyError, TypeError) as error:
        raise damaged(path, MANIFEST, f"lacks checksums ({error!r})") from None


def _shapes(path: Path, manifest: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    try:
        train = (int(manifest["splits"]["train"]["packed_rows"]), int(manifest["seq_len"]))
        heldout = manifest["splits"]["heldout"]
        tokens, documents = int(heldout["tokens"]), int(heldout["documents"])
        names = array_names(manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, MANIFEST, f"lacks sizes ({error!r})") from None
    ragged = {"heldout.offsets.npy": (documents + 1,)}
    return {
        name: train if name.startswith("train.") else ragged.get(name, (tokens,)) for name in names
    }


def _check_examples(path: Path, manifest: dict[str, Any]) -> None:
    """Raise `UserError` if the folder's arrays do not fit the manifest's examples."""
    examples, documents = manifest.get("examples", "texts"), manifest["splits"]["heldout"]
    if examples not in get_args(Examples):
        raise UserError(
            f"{path / MANIFEST}: examples = {examples!r}, but this version of the workflow knows "
            f"{', '.join(get_args(Examples))}. Delete the folder {path} and run the workflow again."
        )
    present = {name for name in OPTIONAL_ARRAYS if name in manifest["files"]}
    names = [name for name, array in OPTIONAL.items() if array.examples == examples]
    allowed = {file for name in names for file in optional_files(name)}
    required = {file for name in names if OPTIONAL[name].required for file in optional_files(name)}
    if not required <= present <= allowed:
        listed = ", ".join(sorted(present)) or "no optional array"
        finding = f"says that its examples are {examples}, and it has {listed}"
        raise damaged(path, MANIFEST, finding)
    if examples in PAIRED and documents["documents"] % 2:
        finding = f"names an odd number of held-out documents, which is none of {examples}"
        raise damaged(path, MANIFEST, finding)


def map_array(path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> Array:
    """Map one `.npy` file after checking its type, shape and size; raises `UserError`."""
    try:
        # no empty array can be mapped
        array: Array = np.load(path, mmap_mode="r" if all(shape) else None, allow_pickle=False)
    except (OSError, ValueError, EOFError, TokenError) as error:  # the last of a header's text
        if is_passing(error):
            raise
        raise damaged(path.parent, path.name, f"cannot be read ({error})") from None
    expected = np.dtype(dtype)
    if array.dtype != expected or array.shape != shape:
        finding = f"is {array.dtype.str} {array.shape}, not {expected.str} {shape}"
        raise damaged(path.parent, path.name, finding)
    if isinstance(array, np.memmap):
        size, promised = path.stat().st_size, array.offset + array.nbytes
        if size != promised:
            raise damaged(path.parent, path.name, f"has {size} bytes instead of {promised}")
    return array


def choose_documents(documents: Sequence[Document], *, at_most: int | None, seed: int) -> list[int]:
    """Return the numbers of documents with trained tokens: all, or `at_most` drawn by `seed`."""
    trained = [number for number, (_, mask) in enumerate(documents) if mask.any()]
    if at_most is None or at_most >= len(trained):
        return trained
    drawn = np.random.default_rng(seed).choice(len(trained), size=at_most, replace=False)
    return [trained[position] for position in sorted(drawn.tolist())]
