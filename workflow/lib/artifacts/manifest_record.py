"""`manifest.json` of a tokens folder, written by `data.tokens.manifest`."""

from typing import Any, Literal

from pydantic import Field

from workflow.lib.artifacts.records import Provenance, Record
from workflow.lib.kernels.attention.answer_rows import AnswerRows, LengthGroup
from workflow.lib.settings.objectives import Examples


class Source(Record):
    """A raw data file. Its counts are of kept rows."""

    split: str | None = None  # `train` or `heldout`
    source: str | None = None  # name of the source that names the file
    weight: float | None = None  # how often an epoch takes the source's documents
    file: str  # path of the file, as the settings name it
    sha256: str  # SHA-256 of the file
    rows: int  # rows read
    format: str | None = None  # format of a row
    columns: list[str] | None = None  # columns that were read
    not_read: dict[str, int] | None = None
    """Columns, and keys of messages, that were not read, with their numbers of values."""
    dropped_by_reason: dict[str, int] | None = None
    """Rows without documents, by reason, except reasons of the split."""
    blank_lines: int | None = None
    """Blank lines of a file with a row a line; neither read nor dropped."""
    special_token_texts: int | None = None
    """Rows that spell a special token of the template (`data.special_tokens_in_text`)."""
    rows_by_turns: int | None = None  # rows whose turns became examples of their own
    begin_untrained: int | None = None
    """Rows whose first turn, without a prompt, is not trained."""
    lost_blanks: int | None = None
    """Rows with blanks around an answer that special tokens of the tokenizer strip."""
    repeat_prompt: int | None = None  # rows whose answer begins with its prompt
    unknown_characters: int | None = None
    """Rows with a trained character that the tokenizer does not know."""
    unrendered: dict[str, int] | None = None
    """Rows with a text that the chat template left out, by its kind (`data.allow_unrendered`)."""
    documents: int | None = None  # documents of its rows, as an epoch takes them
    tokens: int | None = None  # tokens of these documents
    trained_tokens: int | None = None  # of these tokens, the prediction targets
    token_share: float | None = None  # part of its split's tokens


class Percentiles(Record):
    """Lengths of rows before any cut, tokens."""

    p50: float  # median
    p90: float  # 90th percentile
    p99: float  # 99th percentile
    max: float  # longest


class LongRow(Record):
    file: str  # its file
    row: int  # its number in the file, from 1
    tokens: int  # its tokens before any cut


class Split(Record):
    rows_read: int  # rows of its files
    rows_kept: int  # rows with documents
    rows_dropped: int  # rows without documents
    truncated: int  # rows longer than `seq_len`, which were cut or split
    tokens: int  # tokens of its documents
    trained_tokens: int  # of these, the prediction targets
    length_percentiles: Percentiles  # lengths of rows before any cut
    duplicates: int  # rows that equal an earlier one
    longest: list[LongRow] = Field(default=[])  # the longest rows
    good_answers: int | None = None  # examples whose answer is rated as good


class TokenWeights(Record):
    smallest: float  # of a trained token
    largest: float  # of a trained token
    mean: float  # over all trained tokens
    tokens: int  # trained tokens of another weight than 1


class TrainSplit(Split):
    documents: int | None = None
    """Documents as an epoch takes them: a source of weight 2 counts twice."""
    packed_rows: int  # rows of `seq_len` tokens into which they are packed
    fill: float  # share of the positions of these rows that hold a token
    lengths: list[LengthGroup] = Field(default=[])
    """Of documents and padding in packed rows: below 2, 4, ...; how many, tokens, their squares."""
    answer_rows: AnswerRows | None = None
    """Of pairs and groups, whose documents share prompts: the mean row and the largest."""
    weights: TokenWeights | None = None  # absent where every trained token has the weight 1


class SourceDocuments(Record):
    source: str  # name of the source
    documents: int  # its documents, which lie one after the other


class HeldoutSplit(Split):
    documents: int  # documents
    sources: list[SourceDocuments] = Field(default=[])
    """Documents by source, in their order."""


class Splits(Record):
    train: TrainSplit  # training data
    heldout: HeldoutSplit  # held-out data


class SampleOrigin(Record):
    """The origin of a sample document."""

    source: str  # name of the source
    file: str  # path of the file, as the settings name it
    row: int  # its number in the file, from 1
    answer: str | None = None  # its answer to the prompt, of the two of an example


class TokenFiles(Record):
    """SHA-256 of the files of a tokens folder, by name."""

    heldout_input_ids: str = Field(alias="heldout.input_ids.npy")
    """Of this file; equal held-out tokens make losses comparable. All other files have theirs."""
    heldout_weights: str | None = Field(None, alias="heldout.weights.npy")
    """Of the weights of held-out tokens, if there are any but 0 and 1."""


class Probe(Record):
    """A text, or a conversation, with its token ids as trained."""

    text: str | None = None  # the text; null or absent for a conversation
    messages: list[dict[str, Any]] | None = None
    """The messages of a conversation; null or absent for a text."""
    tools: list[dict[str, Any]] | None = None
    """The tools on offer in a conversation; null without any."""
    ids: list[int]  # token ids

    @property
    def described(self) -> str:
        if self.messages is None:
            return "a text"
        roles = ", ".join(str(message["role"]) for message in self.messages)
        return f"a conversation ({roles})"


class ConversationFacts(Record):
    """Facts of `manifest.json` on the form of conversations and the ends of answers."""

    chat_template: str | None  # text of the chat template; null for plain text
    bos_token_id: int | None  # token that begins a text; null if there is none
    eos_token_id: int  # token that ends a text
    pad_token_id: int  # token that pads rows
    end_of_turn_token_ids: list[int]  # special tokens that end the assistant's trained turns
    probes: list[Probe]  # for comparison with an exported tokenizer


class Manifest(Record):
    """`manifest.json` of a tokens folder, without its `ConversationFacts`."""

    format_version: Literal[1]  # version of the folder's format
    seq_len: int  # tokens of a packed row, and of a held-out document at most
    vocab_size: int  # tokens that the tokenizer knows
    pad_token_origin: Literal["pad_token", "eos_token"] | None = None
    """The tokenizer's token that pads rows."""
    format: str  # format of a row of the data
    examples: Examples = "texts"
    """The examples: a document by itself, or two that belong together, neighbours in their row: the
    answers of a pair, or a rated answer and that of another row to the same prompt."""
    tokenizer_sha256: str  # SHA-256 of the tokenizer's files
    chat_template_sha256: str | None  # SHA-256 of the chat template; null for plain text
    template_kwargs: dict[str, Any] | None = None
    """The chat template's default arguments."""
    template_date: str | None = None  # date that the chat template writes into every document
    sources: list[Source]  # the raw data files
    splits: Splits  # counts of both splits
    dropped_by_reason: dict[str, int]  # rows dropped, by the reason
    train_heldout_overlap: int | None = None
    """Held-out rows that were dropped because a training row has the same tokens."""
    train_heldout_near_duplicates: int | None = None
    """Held-out rows that resemble a training row: removed or left (`data.near_duplicates`)."""
    train_heldout_shared_groups: int | None = None
    """Held-out rows of a group (`data.group_by`) with training rows; treated likewise."""
    licences: dict[Literal["model", "data"], str | None] | None = None
    """Licences as the hub or cards name them; null: none is named."""
    files: TokenFiles  # SHA-256 of every other file of the folder, by name
    samples: list[list[tuple[str, bool]]]
    """Three training documents of each source as segments: text, and whether it is trained."""
    sample_origins: list[SampleOrigin] = Field(default=[])  # the origin of each
    provenance: Provenance  # origin of the folder
    sha256: str | None = None  # SHA-256 of the canonical JSON of all other fields
