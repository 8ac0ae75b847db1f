"""The fields of a tokens folder's manifest, as `manifest` collects them and JSON holds them.

What each one means says `artifacts.manifest_record`."""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from workflow.lib.data.encoding.probes import ChatProbe, TextProbe
from workflow.lib.settings.objectives import Examples


class TokenizerFacts(TypedDict):
    """The tokenizer: its size, special token ids and digests."""

    vocab_size: int
    pad_token_id: int  # rows are filled with it
    pad_token_origin: str
    eos_token_id: int
    bos_token_id: int | None
    tokenizer_sha256: str
    chat_template_sha256: str | None


class ChatFacts(TypedDict):
    """How conversations are written, and what an export of them is compared with."""

    chat_template: str | None
    end_of_turn_token_ids: list[int]
    probes: list[TextProbe | ChatProbe]


class FileCounts(TypedDict):
    """What a data file gives to its split, repetitions by weight included."""

    documents: int
    tokens: int
    trained_tokens: int
    token_share: float  # of the split's tokens, 0 to 1


class SourceFacts(FileCounts):
    """A data file: what it is, what was read of it, and what it gives to its split."""

    split: str
    source: str
    weight: float
    file: str
    sha256: str
    rows: int
    format: str
    columns: list[str]
    not_read: dict[str, int]
    dropped_by_reason: dict[str, int]
    blank_lines: int
    special_token_texts: int
    rows_by_turns: int
    begin_untrained: int
    unrendered: dict[str, int]


class Percentiles(TypedDict):
    """Lengths of rows before any cut, tokens."""

    p50: int
    p90: int
    p99: int
    max: int


class Histogram(TypedDict):
    """Rows by length: bin i counts those of `edges[i]` to below `edges[i + 1]` tokens."""

    edges: list[int]
    counts: list[int]


class LongRow(TypedDict):
    """A row among the longest; its tokens are counted before any cut."""

    file: str
    row: int
    tokens: int


class SampleOrigin(TypedDict):
    source: str
    file: str
    row: int
    answer: NotRequired[str]  # what the document is of its example, where that is two


class SourceDocuments(TypedDict):
    """How many documents of a split come from a source."""

    source: str
    documents: int


class WeightFacts(TypedDict):
    """Weights of trained tokens in the loss; `tokens`: how many have another one than 1."""

    smallest: float
    largest: float
    mean: float
    tokens: int


class SplitFacts(TypedDict):
    """A split; lengths are those of the rows before any cut. weights: of the training split, only
    where some are not 1. good_answers: of rated ones, examples."""

    rows_read: int
    rows_kept: int
    rows_dropped: int
    documents: int
    truncated: int
    tokens: int
    trained_tokens: int
    length_percentiles: Percentiles
    length_histogram: Histogram
    longest: list[LongRow]
    duplicates: int
    near_duplicates: int
    weights: NotRequired[WeightFacts]
    good_answers: NotRequired[int]


class TrainFacts(SplitFacts):
    """The training split; `fill` is the share of its rows' tokens that documents take."""

    packed_rows: int
    fill: float


class HeldoutFacts(SplitFacts):
    """The held-out split; its documents lie in the order of `sources`."""

    sources: list[SourceDocuments]


class SplitsFacts(TypedDict):
    train: TrainFacts
    heldout: HeldoutFacts


class DropFacts(TypedDict):
    """Rows that were dropped, and held-out rows that equal a training row."""

    dropped_by_reason: dict[str, int]
    train_heldout_overlap: int


class Manifest(TokenizerFacts, DropFacts, ChatFacts):
    """`manifest.json` without its own checksum."""

    format_version: int
    seq_len: int
    format: str
    examples: Examples
    sources: list[SourceFacts]
    splits: SplitsFacts
    template_kwargs: Mapping[str, object]
    train_heldout_near_duplicates: int
    train_heldout_shared_groups: int
    samples: list[list[tuple[str, bool]]]
    sample_origins: list[SampleOrigin]
    files: dict[str, str]
    provenance: dict[str, Any]
