"""Shards: encoded chunks of a data file, kept on disk until all are done.

A shard is a few files beside each other: `<name>.ids.npy`, `.mask.npy`, `.table.npy`,
`.weights.npy` if tokens have weights, and `.facts.json`, written last. With it and its checksums
the shard is finished, and a resumed run reads it instead of encoding the chunk again. Its content
depends on the chunk and the settings alone. There is no fsync, which would stop every process
several times for each chunk: a file half written at a power cut fails its checksum, and is encoded
again."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from workflow.lib.data.encoding.keys_read import KeyAudit
from workflow.lib.data.encoding.preference_rows import prompt_of
from workflow.lib.data.encoding.row_values import RowError, UnwantedRowError, kind
from workflow.lib.data.encoding.sample_encoder import Encoded, Note
from workflow.lib.data.reading.row_chunks import BrokenRow, Row, Values
from workflow.lib.data.tokens.overlong import CUT, Begun, TooLongError, tokens_needed
from workflow.lib.data.tokens.token_store import Document
from workflow.lib.data.tokens.work_folder import Line
from workflow.lib.settings.data import Overlong
from workflow.lib.settings.objectives import Examples
from workflow.lib.system.files import read_checked_json, write_checked_json

SHARD_VERSION = 13  # raise it when the same chunk and settings give another shard
# Rows that are rendered before they are tokenized: both are faster in one stretch.
ROWS_BEGUN = 64
DIGEST_BYTES = 8  # 64 bits: at 10^8 documents an accidental pair has a chance of 1 in 4,000

# One entry per document; `ordinal` counts the rows read of the chunk, `row` is the number in the
# file, `group` a hash of the row's group (0: none; of preferences the prompt, unless a column is
# set), `desirable` whether a rated answer is good.
TABLE = np.dtype(
    [
        ("length", "<u4"),
        ("full_length", "<u4"),
        ("trained", "<u4"),
        ("ordinal", "<u4"),
        ("row", "<u8"),
        ("digest", "<u8"),
        ("group", "<u8"),
        ("desirable", "|b1"),
    ]
)


FIRST_REASONS = 5  # unusable rows that an error message quotes
# Rows that are counted: unusable ones (dropped, and no setting names them); those whose text spells
# a special token, encoded as text; those with turns as examples of their own (`SampleEncoder`);
# those with a note.
ROW_COUNTS = ("unusable", "special_token_texts", "rows_by_turns", *get_args(Note))


@dataclass(kw_only=True)
class RowCounts:
    """Counts of the rows of a shard or a file."""

    rows_read: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Rows by `ROW_COUNTS`."""
    unrendered: Counter[str] = field(default_factory=Counter)
    """Rows with an allowed text that the template left out, by the kind of the text."""
    first_reasons: list[str] = field(default_factory=list)  # of unusable rows
    needed_tokens: int = 0  # `seq_len` that holds all rows of which nothing could be trained
    columns: list[str] = field(default_factory=list)
    """Columns that were read; `not_read`: others and keys, with their numbers of values."""
    not_read: Counter[str] = field(default_factory=Counter)


@dataclass(kw_only=True)
class ShardFacts(RowCounts):
    """Facts on a shard without its documents."""

    documents: int = 0
    tokens: int = 0
    dropped: list[int] = field(default_factory=list)
    """Ordinals of the rows without a document."""
    rejects: list[Line] = field(default_factory=list)
    """Lines of `rejects.jsonl`, without the file; `cuts`: of `truncated.jsonl`."""
    cuts: list[Line] = field(default_factory=list)
    checksums: dict[str, int] = field(default_factory=dict)  # CRC-32 of each array


class ShardBuilder:
    def __init__(
        self, *, seq_len: int, overlong: Overlong, group_by: str | None, examples: Examples
    ) -> None:
        self._seq_len = seq_len
        self._examples = examples
        self._group_by = group_by
        self._overlong = overlong
        self._pieces: list[Encoded] = []
        self._table: list[tuple[int, ...]] = []
        self.facts = ShardFacts()

    def add(self, row: Row | BrokenRow, begun: Begun | RowError) -> None:
        """Encode a begun row, or count it as dropped."""
        try:
            if isinstance(begun, RowError):
                raise begun
            assert isinstance(row, Row), "a broken row is not begun"
            self._keep(row.number, begun, group_of(row.value, self._group_by))
        except RowError as error:
            dropped = {"row": row.number, "reason": str(error), "preview": row.preview}
            self.facts.dropped.append(self.facts.rows_read)
            self.facts.rejects.append(dropped)
            if not isinstance(error, UnwantedRowError):
                self._count_unusable(row.number, error)
        self.facts.rows_read += 1

    def _count_unusable(self, number: int, error: RowError) -> None:
        self.facts.counts["unusable"] += 1
        if len(self.facts.first_reasons) < FIRST_REASONS:
            self.facts.first_reasons.append(f"row {number}: {error}")
        if isinstance(error, TooLongError):
            self.facts.needed_tokens = max(self.facts.needed_tokens, error.needed)

    def _keep(self, number: int, begun: Begun, group: int) -> None:
        examples = begun.encode()
        full = tokens_needed(examples, self._examples)
        if begun.divide is not None and full > self._seq_len:
            pieces = begun.divide()
        else:
            pieces = CUT[self._examples](examples, seq_len=self._seq_len, overlong=self._overlong)
        if self._examples != "texts" and not group:
            group = max(1, digest(prompt_of(pieces[0].ids, pieces[0].mask).tobytes()))
        for piece in pieces:
            self._pieces.append(piece)
            self._table.append(
                (
                    len(piece.ids),
                    full,
                    int(np.count_nonzero(piece.mask)),
                    self.facts.rows_read,
                    number,
                    digest((piece.ids if piece.composed is None else piece.composed).tobytes()),
                    group,
                    piece.desirable,
                )
            )
        if full > self._seq_len:
            tokens = sum(len(encoded.ids) for encoded in examples)
            kept_tokens = sum(len(piece.ids) for piece in pieces)
            self.facts.cuts.append(
                {"row": number, "tokens": tokens, "documents": len(pieces), "kept": kept_tokens}
            )
        counts = self.facts.counts
        counts["special_token_texts"] += any(encoded.held_special_text for encoded in examples)
        counts["rows_by_turns"] += self._examples == "texts" and len(examples) > 1
        counts.update(frozenset().union(*(encoded.notes for encoded in examples)))
        self.facts.unrendered.update(examples[0].unrendered)

    def save(self, stem: Path) -> None:
        """Write the shard's files; the facts, last, mark it as finished."""
        table = np.array(self._table, dtype=TABLE)
        self.facts.documents, self.facts.tokens = len(table), int(table["length"].sum())
        ids = [piece.ids for piece in self._pieces] or [np.empty(0, dtype=np.uint32)]
        mask = [piece.mask for piece in self._pieces] or [np.empty(0, dtype=np.bool_)]
        arrays = {
            "ids": np.concatenate(ids).astype("<u4", copy=False),
            "mask": np.concatenate(mask),
            "table": table,
        }
        if any(piece.weights is not None for piece in self._pieces):
            weights = [
                piece.mask.astype("<f4") if piece.weights is None else piece.weights
                for piece in self._pieces
            ]
            arrays["weights"] = np.concatenate(weights).astype("<f4", copy=False)
        for name, array in arrays.items():
            save_array(stem, name, array)
            self.facts.checksums[name] = checksum(array)
        write_checked_json(Path(f"{stem}.facts.json"), vars(self.facts))


def digest(content: bytes) -> int:
    """Return the BLAKE2b digest of `DIGEST_BYTES` bytes as a number."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest(), "little")


def group_of(value: Values, group_by: str | None) -> int:
    """Return a hash of the column `group_by`, 0 without one; raises `RowError` without value."""
    if group_by is None:
        return 0
    group = value.get(group_by)
    if group is None or group == "" or isinstance(group, list | dict):
        raise RowError(f"no group: column {group_by!r} (data.group_by) is {kind(group)}")
    return max(1, digest(str(group).encode(errors="surrogatepass")))


def encode_rows(
    rows: Sequence[Row | BrokenRow],
    *,
    begin: Callable[[Row], Begun],
    keys: KeyAudit,
    seq_len: int,
    overlong: Overlong,
    stem: Path,
    group_by: str | None = None,
    examples: Examples = "texts",
) -> None:
    """Write the shard of a chunk's rows to `stem`. All rows of a block are begun, then ended
    (`SampleEncoder.begin`). keys: the account of keys in `begin`."""
    builder = ShardBuilder(seq_len=seq_len, overlong=overlong, group_by=group_by, examples=examples)
    for start in range(0, len(rows), ROWS_BEGUN):
        block = rows[start : start + ROWS_BEGUN]
        for row, begun in zip(block, [_begun(row, begin) for row in block], strict=True):
            builder.add(row, begun)
    builder.facts.columns, not_read = keys.report()
    builder.facts.not_read.update(not_read)
    builder.save(stem)


def _begun(row: Row | BrokenRow, begin: Callable[[Row], Begun]) -> Begun | RowError:
    if isinstance(row, BrokenRow):
        return RowError(row.reason)
    try:
        return begin(row)
    except RowError as error:
        return error


@dataclass(frozen=True)
class Shard:
    """A finished shard; its arrays are read from disk at each access."""

    stem: Path
    file: int
    first_ordinal: int
    rows_read: int
    documents: int
    tokens: int

    def table(self) -> npt.NDArray[Any]:
        """Return the shard's `TABLE`, (documents,)."""
        table: npt.NDArray[Any] = np.load(f"{self.stem}.table.npy", allow_pickle=False)
        return table

    def ids(self) -> npt.NDArray[np.uint32]:
        """Return the token ids of all documents, concatenated, shape (tokens,), mapped."""
        return mapped(f"{self.stem}.ids.npy")

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return the loss mask of all documents, concatenated, (tokens,), mapped."""
        return mapped(f"{self.stem}.mask.npy")

    @property
    def has_weights(self) -> bool:
        """Whether a token has a weight other than 0 and 1."""
        return Path(f"{self.stem}.weights.npy").exists()

    def weights(self) -> npt.NDArray[np.float32]:
        """Return the loss weights of all documents, (tokens,); the mask as 0 and 1 without
        weights."""
        if self.has_weights:
            return mapped(f"{self.stem}.weights.npy")
        return self.mask().astype(np.float32)

    def desirable(self) -> npt.NDArray[np.bool_]:
        """Return whether each token of `ids` belongs to a good answer."""
        table = self.table()
        return np.repeat(table["desirable"], table["length"])

    def facts(self) -> ShardFacts:
        return read_facts(self.stem)


def save_array(stem: Path, name: str, array: npt.NDArray[Any]) -> None:
    np.save(f"{stem}.{name}.npy", array, allow_pickle=False)


def checksum(array: npt.NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def is_finished(stem: Path) -> bool:
    """Tell whether a shard is complete: its facts and arrays agree with their checksums."""
    try:
        checksums = read_facts(stem).checksums
        return bool(checksums) and all(
            checksum(mapped(f"{stem}.{name}.npy")) == recorded
            for name, recorded in checksums.items()
        )
    except (OSError, ValueError, TypeError):  # missing, cut off, or with other fields
        return False


def read_facts(stem: Path) -> ShardFacts:
    return ShardFacts(**read_checked_json(Path(f"{stem}.facts.json")))


def mapped(path: str) -> npt.NDArray[Any]:
    """Return a `.npy` file's array by memory map (an empty array cannot be mapped). It is a plain
    array over the map: slices of `np.memmap` take four times as long."""
    mode: Literal["r"] | None = "r" if Path(path).stat().st_size > 128 else None
    return np.asarray(np.load(path, mmap_mode=mode, allow_pickle=False))


OPEN_SHARDS = 128  # shards that stay mapped; each has two files


class Documents:
    """All documents of a corpus: a few numbers of each in memory, their tokens in the shards.

    Attributes, each of shape (documents,): `lengths` tokens as kept, `full_lengths` of the whole
    row, `trained` tokens, `starts` first token in the shard, `rows` number of the row in its file,
    `ordinals` its number among all rows read, `digests` of the token ids, `groups` hash of the
    row's group (0: none), `desirable` whether a rated answer is good."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        counts = np.array([shard.documents for shard in shards], dtype=np.int64)
        self.shard_offsets = np.concatenate([[0], np.cumsum(counts)])
        assert self.shard_offsets[-1] < 2**32, "documents are numbered in 4 bytes"
        table = np.concatenate([np.empty(0, dtype=TABLE), *(shard.table() for shard in shards)])
        self.lengths: npt.NDArray[np.uint32] = table["length"].copy()
        self.full_lengths: npt.NDArray[np.uint32] = table["full_length"].copy()
        self.trained: npt.NDArray[np.uint32] = table["trained"].copy()
        self.rows: npt.NDArray[np.uint64] = table["row"].copy()
        self.digests: npt.NDArray[np.uint64] = table["digest"].copy()
        self.groups: npt.NDArray[np.uint64] = table["group"].copy()
        self.desirable: npt.NDArray[np.bool_] = table["desirable"].copy()
        firsts = np.array([shard.first_ordinal for shard in shards], dtype=np.uint64)
        self.ordinals: npt.NDArray[np.uint64] = table["ordinal"] + np.repeat(firsts, counts)
        tokens = np.array([shard.tokens for shard in shards], dtype=np.int64)
        ends = np.cumsum(self.lengths, dtype=np.int64)
        self.starts = ends - self.lengths - np.repeat(np.cumsum(tokens) - tokens, counts)
        self._mapped = lru_cache(OPEN_SHARDS)(lambda n: (shards[n].ids(), shards[n].mask()))

    def __len__(self) -> int:
        return int(self.shard_offsets[-1])

    def __getitem__(self, index: int) -> Document:
        """Return document `index`: (token ids uint32, loss mask bool), shape (length,), mapped."""
        ids, mask = self._mapped(self.shard_of(index))
        start = int(self.starts[index])
        span = slice(start, start + int(self.lengths[index]))
        return ids[span], mask[span]

    def gather(
        self, numbers: npt.NDArray[np.uint32]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Return token ids, mask and lengths of some documents (at least one), end to end."""
        ids, masks = zip(*(self[number] for number in numbers.tolist()), strict=True)
        return np.concatenate(ids), np.concatenate(masks), self.lengths[numbers].astype(np.int64)

    def file(self, index: int) -> int:
        """Return the number of a document's file."""
        return self.shards[self.shard_of(index)].file

    def by_shard(
        self, chosen: npt.NDArray[np.uint32]
    ) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """Yield the ascending `chosen` documents shard by shard: number of the shard, and its
        documents."""
        edges = np.searchsorted(chosen, self.shard_offsets)
        for shard in np.flatnonzero(np.diff(edges)).tolist():
            yield shard, chosen[edges[shard] : edges[shard + 1]]

    def shard_of(self, index: int) -> int:
        return int(np.searchsorted(self.shard_offsets, index, side="right")) - 1
