"""The tokens folder: flat little-endian `.npy` files and a manifest, read by memory map, without torch.

A training row holds whole documents one after the other; `position_ids` starts again at 0 with each of
them, so a row needs no attention mask. The padding tail is one more document that trains nothing.
`loss_mask[i]` says that token i is a prediction target, predicted from token i - 1 of the same document:
it is never True where `position_ids` is 0. Held-out documents lie unpacked behind each other, cut by offsets.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from workflow.lib.artifacts import is_passing, read_json
from workflow.lib.errors import UserError
from workflow.lib.packing import Packing

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
REJECTS = "rejects.jsonl"
TRUNCATED = "truncated.jsonl"

# Every array of the folder and its type on disk; the shapes follow from the manifest (`_shapes`).
ARRAYS: dict[str, npt.DTypeLike] = {
    "train.input_ids.npy": "<u4",
    "train.loss_mask.npy": "|b1",
    "train.position_ids.npy": "<i4",
    "heldout.input_ids.npy": "<u4",
    "heldout.loss_mask.npy": "|b1",
    "heldout.offsets.npy": "<i8",
}
BLOCK_TOKENS = 2**19  # tokens of the rows that are put together in memory at a time
CHUNK_TOKENS = 2**24  # mask entries (bytes) read at a time where a whole array is summed

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
        place = index % len(self)
        span = slice(int(self._offsets[place]), int(self._offsets[place + 1]))
        return self._ids[span], self._mask[span]


class TokenStore:
    """A tokens folder opened for reading; arrays stay on disk until they are indexed.

    Attributes: `manifest`; `num_rows`; `seq_len`, tokens; `input_ids` uint32, `loss_mask` bool and
    `position_ids` int32, the training arrays, each of shape (num_rows, seq_len).
    """

    def __init__(self, *, manifest: dict[str, Any], arrays: dict[str, Array]) -> None:
        self.manifest = manifest
        self.input_ids = arrays["train.input_ids.npy"]
        self.loss_mask = arrays["train.loss_mask.npy"]
        self.position_ids = arrays["train.position_ids.npy"]
        self.num_rows, self.seq_len = self.input_ids.shape
        self._heldout = HeldoutDocuments(
            ids=arrays["heldout.input_ids.npy"],
            mask=arrays["heldout.loss_mask.npy"],
            offsets=arrays["heldout.offsets.npy"],
        )

    @classmethod
    def open(cls, path: Path) -> "TokenStore":
        """Map the arrays of the folder `path`, after checking version, types, shapes and file sizes.

        Raises `UserError` if the folder is missing, of another format version, or damaged.
        """
        manifest = _read_manifest(path)
        shapes = _shapes(path, manifest)
        return cls(
            manifest=manifest,
            arrays={name: _map_array(path / name, shape) for name, shape in shapes.items()},
        )

    @cached_property
    def trained_tokens_per_row(self) -> npt.NDArray[np.int32]:
        """Prediction targets of each training row, shape (num_rows,); read in chunks at the first use."""
        counts = np.empty(self.num_rows, dtype=np.int32)
        step = max(1, CHUNK_TOKENS // self.seq_len)
        for first in range(0, self.num_rows, step):
            rows = slice(first, first + step)
            counts[rows] = self.loss_mask[rows].sum(axis=1, dtype=np.int32)
        return counts

    def heldout_documents(self) -> Sequence[Document]:
        """Return the held-out documents, each as (token ids uint32, loss mask bool) of shape (length,)."""
        return self._heldout

    def heldout_sources(self) -> list[str]:
        """Return the name of the source of each held-out document, as the manifest tells it.

        Raises `UserError` if it tells of another number of documents.
        """
        try:
            parts = self.manifest["splits"]["heldout"]["sources"]
            names = [part["source"] for part in parts for _ in range(part["documents"])]
        except (KeyError, TypeError) as error:
            raise self._lacking_sources(repr(error)) from None
        if len(names) != len(self._heldout):
            raise self._lacking_sources(f"{len(names)} documents instead of {len(self._heldout)}")
        return names

    @staticmethod
    def _lacking_sources(finding: str) -> UserError:
        return UserError(
            f"{MANIFEST} of the tokens does not say where the held-out documents come from ({finding}). "
            "Delete the tokens folder and run the workflow again."
        )

    @property
    def num_heldout_documents(self) -> int:
        """Number of held-out documents."""
        return len(self._heldout)


@dataclass(frozen=True)
class Window:
    """Documents that are packed together: document d is `ids[starts[d] : starts[d] + lengths[d]]`, masks alike."""

    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    packing: Packing


class ArrayWriter:
    """Writes a `.npy` file front to back, of which the number of rows is known at the end. A context manager."""

    def __init__(self, path: Path, *, row_shape: tuple[int, ...] = ()) -> None:
        self._dtype = np.dtype(ARRAYS[path.name])
        self._row_shape = row_shape
        self.rows = 0
        self._file = path.open("wb")
        self._write_header()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Write the header anew, and sync the file."""
        end = self._file.tell()
        self._file.seek(0)
        self._write_header()
        self._file.seek(end)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write_header(self) -> None:
        """Its length is the same for any number of rows: NumPy leaves room for the first axis to grow."""
        shape = (self.rows, *self._row_shape)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, array: Array) -> None:
        """Write rows of shape (any number, *row_shape)."""
        assert array.shape[1:] == self._row_shape, f"rows of shape {array.shape[1:]}"
        array.astype(self._dtype, copy=False).tofile(self._file)
        self.rows += len(array)


def write_train(folder: Path, windows: Iterable[Window], *, seq_len: int, pad_token_id: int) -> int:
    """Write the training arrays into `folder`, window by window; return the number of rows."""
    with ExitStack() as stack:
        writers = [
            stack.enter_context(ArrayWriter(folder / name, row_shape=(seq_len,)))
            for name in ARRAYS
            if name.startswith("train.")
        ]
        for window in windows:
            assert not window.mask[window.starts].any(), (
                "the first token of a document cannot be a target"
            )
            for parts in _packed_rows(window, seq_len, pad_token_id):
                for writer, part in zip(writers, parts, strict=True):
                    writer.append(part)
    return writers[0].rows


def _packed_rows(
    window: Window, seq_len: int, pad_token_id: int
) -> Iterator[tuple[Array, Array, Array]]:
    """Yield (input ids, loss mask, position ids), shape (rows, seq_len), of some rows at a time."""
    packing, step = window.packing, max(1, BLOCK_TOKENS // seq_len)
    for first in range(0, packing.num_rows, step):
        offsets = packing.offsets[first : first + step + 1]
        documents = packing.documents[offsets[0] : offsets[-1]]
        lengths, starts = window.lengths[documents], window.starts[documents]
        before = np.concatenate(
            ([0], np.cumsum(lengths))
        )  # tokens of the block before each document
        row_starts = before[offsets - offsets[0]]
        fill = np.diff(row_starts)
        rows = np.repeat(np.arange(len(fill)), np.diff(offsets))
        places = rows * seq_len + before[:-1] - row_starts[rows]
        source, target = spans(starts, lengths), spans(places, lengths)
        ids = np.full(len(fill) * seq_len, pad_token_id, dtype=np.uint32)
        mask = np.zeros(len(fill) * seq_len, dtype=np.bool_)
        # What no document takes is one more document: its positions begin where the last one ends.
        positions = (np.arange(seq_len, dtype=np.int32) - fill[:, None].astype(np.int32)).ravel()
        ids[target], mask[target] = window.ids[source], window.mask[source]
        positions[target] = spans(np.zeros_like(lengths), lengths)
        shape = (len(fill), seq_len)
        yield ids.reshape(shape), mask.reshape(shape), positions.reshape(shape)


def spans(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers from each start on, as many as its length, behind each other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


def write_heldout(folder: Path, documents: Iterable[tuple[Array, Array, Array]]) -> None:
    """Write the held-out arrays into `folder`, one document behind the other.

    documents: some at a time, as (ids, mask, lengths): the tokens of all of them behind each other.
    """
    lengths = [np.zeros(1, dtype=np.int64)]
    with (
        ArrayWriter(folder / "heldout.input_ids.npy") as all_ids,
        ArrayWriter(folder / "heldout.loss_mask.npy") as all_masks,
        ArrayWriter(folder / "heldout.offsets.npy") as offsets,
    ):
        for ids, mask, some in documents:
            all_ids.append(ids)
            all_masks.append(mask)
            lengths.append(some.astype(np.int64))
        offsets.append(np.cumsum(np.concatenate(lengths)))


def _read_manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"{path} holds no {MANIFEST}: it is no finished tokens folder. "
            "Delete it if it exists, and run the workflow again; tokenize_dataset writes it."
        )
    try:
        manifest = read_json(path / MANIFEST)
        version = manifest["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"{MANIFEST} cannot be read ({error!r})") from None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path / MANIFEST}: format_version = {version!r}, but this version of the workflow reads "
            f"{FORMAT_VERSION}. Delete the folder {path} and run the workflow again."
        )
    assert isinstance(manifest, dict)
    return manifest


def _shapes(path: Path, manifest: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape that the manifest promises for each array."""
    try:
        train = (int(manifest["splits"]["train"]["packed_rows"]), int(manifest["seq_len"]))
        heldout = manifest["splits"]["heldout"]
        tokens, documents = int(heldout["tokens"]), int(heldout["documents"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{MANIFEST} lacks sizes ({error!r})") from None
    ragged = {"heldout.offsets.npy": (documents + 1,)}
    return {
        name: train if name.startswith("train.") else ragged.get(name, (tokens,)) for name in ARRAYS
    }


def _map_array(path: Path, shape: tuple[int, ...]) -> Array:
    """Map one `.npy` file after checking its type, shape and size."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        if is_passing(error):
            raise
        raise _damaged(path.parent, f"{path.name} cannot be read ({error})") from None
    expected = np.dtype(ARRAYS[path.name])
    if array.dtype != expected or array.shape != shape:
        found = f"{array.dtype.str} {array.shape}"
        raise _damaged(
            path.parent, f"{path.name} is {found}, the manifest says {expected.str} {shape}"
        )
    assert isinstance(array, np.memmap)
    size, promised = path.stat().st_size, array.offset + array.nbytes
    if size != promised:
        raise _damaged(path.parent, f"{path.name} has {size} bytes instead of {promised}")
    return array


def _damaged(path: Path, finding: str) -> UserError:
    return UserError(
        f"The tokens folder {path} is damaged: {finding}. Delete the folder and run the workflow again."
    )
