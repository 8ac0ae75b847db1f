"""Settings of the dataset: its rows, their meaning, and their conversion to tokens."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, JsonValue, Tag, model_validator
from pydantic_core import PydanticCustomError

from workflow.lib.settings.errors_in_words import ARGUMENT
from workflow.lib.settings.section_base import Affects, Name, Section, Share, label

Format = Literal["messages", "prompt_completion", "alpaca", "tokens", "text", "pairs", "ranked"]
FileType = Literal[
    "jsonl", "json", "csv", "tsv", "parquet", "arrow", "text", "text_paragraphs", "text_lines"
]
TemplateArgument = Annotated[str, Field(pattern=ARGUMENT)]
# Parts of a conversation that a chat template may leave out: texts of its roles, the assistant's
# reasoning and calls, results of tools, tools on offer, and arguments of the template itself.
TextKind = Literal[
    "system", "user", "assistant", "reasoning", "calls", "results", "tools", "template_kwargs"
]
Overlong = Literal["truncate", "split", "drop"]
SpecialTokens = Literal["text", "tokens"]
DataPath = Annotated[str, Field(max_length=1024)]


class DataColumns(Section):
    """Names of the dataset's columns, for datasets that call them otherwise."""

    prompt: str = "prompt"
    """Column with the prompt (format prompt_completion)."""
    completion: str = "completion"
    """Column with the completion (format prompt_completion)."""
    messages: str = "messages"
    """Column with the list of chat messages (format messages)."""
    instruction: str = "instruction"
    """Column with the instruction (format alpaca)."""
    input: str = "input"
    """Column with the optional input (format alpaca)."""
    output: str = "output"
    """Column with the answer (format alpaca)."""
    system: str = "system"
    """Column with the optional system text (conversations); `system_prompt` and `system_message`
    are read too."""
    history: str = "history"
    """Column with the optional earlier turns, as messages or pairs (formats alpaca and
    prompt_completion)."""
    text: str = "text"
    """Column with plain text (format text)."""
    tools: str = "tools"
    """Column with the optional list of tools on offer (conversations); `functions` is read too."""
    input_ids: str = "input_ids"
    """Column with token ids (format tokens)."""
    labels: str = "labels"
    """Column with the token id of each trained token and -100 for others (format tokens)."""
    loss_mask: str = "loss_mask"
    """Column with 1 for trained tokens and 0 for others, instead of labels (format tokens)."""
    weight: str = "weight"
    """Column with a row's weight in the loss, at least 0; turns may have a weight too. Loss = sum(w
    (-log p)) / sum(w)."""
    chosen: str = "chosen"
    """Column with the preferred answer, or its conversation (format pairs)."""
    rejected: str = "rejected"
    """Column with the other answer, or its conversation (format pairs)."""
    preference: str | None = None
    """Column with a number that says which answer is preferred (format pairs): below 0 `chosen`,
    above 0 `rejected`, 0 is a tie; null = always `chosen`."""
    score_chosen: str = "score_chosen"
    """Column with the optional score of the preferred answer (format pairs)."""
    score_rejected: str = "score_rejected"
    """Column with the optional score of the other answer (format pairs); equal scores are a tie."""
    answers: str = "answers"
    """Column with a list of answers, each with its score; the best and the worst are a pair (format
    ranked)."""
    score: str = "score"
    """Key of an answer's score (higher is better) or `rank` (lower is better) (format ranked)."""
    label: str | None = None
    """Column with true for a good answer and false for a bad one; null = `label` (objective kto).
    Supervised training leaves out bad answers if it is named."""

    @model_validator(mode="after")
    def _roles_have_columns_of_their_own(self) -> "DataColumns":
        for roles in ROLES_OF_A_ROW:
            role_by_column: dict[str, str] = {}
            for role in roles:
                column = getattr(self, role)
                if (other := role_by_column.setdefault(column, role)) != role:
                    raise ValueError(
                        f"{role} = {column}: {other} is read from this column too, and a row needs "
                        "one for each. Name another column for one of them"
                    )
        return self


# Columns of one row, by format.
ROLES_OF_A_ROW = (
    ("prompt", "completion", "system", "history", "tools", "weight"),
    ("instruction", "input", "output", "system", "history", "tools", "weight"),
    ("messages", "system", "tools", "weight"),
    ("input_ids", "labels", "loss_mask", "weight"),
    ("text", "weight"),
    (
        *("prompt", "chosen", "rejected", "preference", "score_chosen", "score_rejected"),
        *("system", "history", "tools"),
    ),
    ("prompt", "answers", "system", "history", "tools"),
)


class DataSource(Section):
    """One of several sources of a split: its files, and how they differ from what `data` says of
    all."""

    path: DataPath
    """File, folder or glob, as in `data.train`."""
    name: Name | None = None
    """Label of the source in listings and in the report; null = its path."""
    weight: float = Field(1.0, ge=1e-6, le=100.0)
    """How often an epoch takes each of its documents: 0.5 = a seeded half of them once, 2 = all of
    them twice; training only."""
    file_type: Literal["auto", FileType] | None = None
    """As `data.file_type`, for this source; null = as there."""
    format: Literal["auto", Format] | None = None
    """As `data.format`, for this source; null = as there."""
    columns: DataColumns | None = None
    """As `data.columns`, for this source; null = as there."""
    group_by: str | None = Field(None, min_length=1, max_length=256)
    """As `data.group_by`, for this source; null = as there."""
    overlong: Overlong | None = None
    """As `data.overlong`, for this source; null = as there."""


def _entry(value: Any) -> str:
    return "<source>" if isinstance(value, Mapping | DataSource) else "<path>"


def _entries(value: Any) -> str:
    return "<list>" if isinstance(value, list | tuple) else _entry(value)


def _not_empty(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    if not entries:  # `min_length` would not count wrong entries
        raise PydanticCustomError("too_short", "must have an entry", {"min_length": 1})
    return entries


# A tag selects the branch, so an error names the user's own form, not all possible ones.
_Entry = Annotated[
    Annotated[DataPath, Tag("<path>")] | Annotated[DataSource, Tag("<source>")],
    Discriminator(_entry),
]
DataSources = Annotated[
    Annotated[DataPath, Tag("<path>")]
    | Annotated[DataSource, Tag("<source>")]
    | Annotated[tuple[_Entry, ...], AfterValidator(_not_empty), Tag("<list>")],
    Discriminator(_entries),
]


class DataConfig(Section):
    """The dataset and how it becomes tokens."""

    affects: ClassVar = Affects(
        "result",
        stages=(
            "tokenize_dataset",
            "sample_answers",
            "pack_answers",
            "preflight_run",
            "write_card",
        ),
    )

    name: Name = "data"
    """Label of the dataset, part of its artifacts' folder names; by default the last part of
    `source`, or of the first path of `train`."""
    source: str | None = Field(None, min_length=1, max_length=1024)
    """Hugging Face hub dataset id `owner/name`; `train` and `heldout` name its files. null = local
    files."""
    revision: str | None = Field(None, min_length=1, max_length=256)
    """Hub branch, tag or commit of `source` (null = `main`); resolved to a commit once and
    recorded."""
    train: DataSources = ""
    """Required: a file, folder, glob or source (`path`, `name`, `weight`, `file_type`, `format`,
    `columns`), or a list of these."""
    heldout: DataSources | None = None
    """Held-out data, named like the training data; null = `heldout_share` of the training data."""
    heldout_share: float = Field(0.05, ge=1e-6, lt=1.0)
    """Share of rows held out if `heldout` is null. `seed` decides which rows."""
    group_by: str | None = Field(None, min_length=1, max_length=256)
    """Rows with an equal value in this column stay on one side of the split. Equal values in
    held-out files count as `near_duplicates`."""
    file_type: Literal["auto", FileType] = "auto"
    """File type; `auto` = by extension, without .gz, .zst, .bz2 or .xz. Plain text gives a document
    per file, paragraph or line."""
    format: Literal["auto", Format] = "auto"
    """Format of the rows; `auto` = by the columns of each source."""
    columns: DataColumns = DataColumns()
    """Column names, where the dataset calls them otherwise."""
    chat_template: str | None = Field(None, min_length=1, max_length=1024)
    """Jinja chat template file; null = the tokenizer's own."""
    template_kwargs: dict[TemplateArgument, JsonValue] = Field({})
    """Arguments of the chat template, such as {enable_thinking: false}, also for the exported
    template. A row's `chat_template_kwargs` override them."""
    allow_unrendered: tuple[TextKind, ...] = ()
    """Texts that the chat template may omit (`[reasoning]`); they are counted. Rows that lose other
    texts are dropped."""
    special_tokens_in_text: SpecialTokens | None = None
    """Special tokens spelled in data are ordinary text (`text`) or tokens (`tokens`); null = text
    if they are rare, else an error."""
    leave_out: tuple[str, ...] = ()
    """Columns and message keys to ignore and count, although they may change the training."""
    media: Literal["refuse", "omit"] = "refuse"
    """Pictures, sounds and videos: refuse their rows, or remove and count them."""
    loss_on: Literal["completions", "last_turn", "all"] = "completions"
    """Trained tokens: all assistant turns (except those of weight 0), only the last one, or every
    token."""
    seq_len: int = Field(1024, ge=8, le=1_048_576)
    """Length of a training row, tokens."""
    packing: bool = True
    """Pack several documents into a row; attention never crosses documents."""
    overlong: Overlong = "truncate"
    """Rows longer than `seq_len`: cut at the end, split (texts anywhere, chats before a question,
    with the system text), or dropped; all are counted and listed. A source may have its own."""
    near_duplicates: Literal["remove", "refuse", "keep"] = "remove"
    """Held-out rows that a training row nearly repeats: removed, an error, or kept. They are always
    counted."""
    near_duplicate_threshold: float = Field(0.5, ge=0.1, le=1.0)
    """Least similarity of near-duplicates: common runs of six words over the runs of both texts, at
    equal length; 1 = the same words."""
    max_rejected_share: Annotated[Share, Affects("none")] = 0.01
    """The run stops above this share of dropped rows, for any reason but a setting that names them:
    `columns.label`, `columns.weight`, `overlong: drop`."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the held-out split and of the packing order."""

    @model_validator(mode="before")
    @classmethod
    def _named_after_its_files(cls, document: Any) -> Any:
        if not isinstance(document, Mapping):
            return document
        first = document.get("source") or document.get("train") or ""
        first = first[0] if isinstance(first, list | tuple) else first
        path = first.get("path") if isinstance(first, Mapping) else first
        return {"name": label(str(path or ""), default="data"), **document}

    @property
    def train_sources(self) -> tuple[DataSource, ...]:
        """The training sources, with the settings that they leave to `data`."""
        return self._filled(self.train) if self.train else ()

    @property
    def heldout_sources(self) -> tuple[DataSource, ...]:
        """The held-out sources with all settings; empty if they are split off."""
        return () if self.heldout is None else self._filled(self.heldout)

    def _filled(self, value: DataSources) -> tuple[DataSource, ...]:
        entries = value if isinstance(value, tuple) else (value,)
        sources = [DataSource(path=e) if isinstance(e, str) else e for e in entries]
        return tuple(
            source.model_copy(
                update={
                    "file_type": source.file_type or self.file_type,
                    "format": source.format or self.format,
                    "columns": source.columns or self.columns,
                    "group_by": source.group_by or self.group_by,
                    "overlong": source.overlong or self.overlong,
                }
            )
            for source in sources
        )

    @model_validator(mode="after")
    def _heldout_has_no_weight(self) -> "DataConfig":
        weighted = [source.path for source in self.heldout_sources if source.weight != 1.0]
        if weighted:
            raise ValueError(
                f"heldout gives {weighted[0]!r} a weight, but every held-out document is measured "
                "once. Remove the weight, or name fewer files"
            )
        return self

    @model_validator(mode="after")
    def _revision_needs_source(self) -> "DataConfig":
        if self.revision is not None and self.source is None:
            raise ValueError(
                "revision is set but source is null: local files have no revision. Set source, or "
                "remove revision"
            )
        return self
