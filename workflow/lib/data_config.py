"""Settings of the dataset: where its rows are, what they mean, how they become tokens."""

from typing import Literal

from pydantic import Field, model_validator

from workflow.lib.section import Name, Section, Share


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
    text: str = "text"
    """Column with plain text (format text)."""


class DataConfig(Section):
    """The dataset and how it becomes tokens."""

    name: Name = "pydocs"
    """Label of the dataset; part of its artifacts' folder names."""
    source: str | None = Field(None, min_length=1, max_length=1024)
    """Hugging Face hub dataset id `owner/name` whose files `train` and `heldout` name; null = local files."""
    revision: str | None = Field(None, min_length=1, max_length=256)
    """Hub branch, tag or commit of `source` (null = `main`); resolved to a commit once and recorded."""
    train: str = Field("workflow/resources/pydocs/train.jsonl", min_length=1, max_length=1024)
    """Training file: .jsonl, .json, .csv or .parquet; a path, or with `source` a path in that dataset."""
    heldout: str | None = Field(
        "workflow/resources/pydocs/heldout.jsonl", min_length=1, max_length=1024
    )
    """Held-out file of the same kinds; null = split `heldout_share` off the training file."""
    heldout_share: float = Field(0.05, gt=0.0, lt=1.0)
    """Share of rows held out when `heldout` is null (0 to 1); the split is a pure function of `seed`."""
    format: Literal["auto", "messages", "prompt_completion", "alpaca", "text"] = "auto"
    """What a row is; `auto` decides by the columns that are there."""
    columns: DataColumns = DataColumns()
    """Column names, where the dataset calls them otherwise."""
    chat_template: str | None = Field(None, min_length=1, max_length=1024)
    """Jinja chat template file; null = the tokenizer's own."""
    loss_on: Literal["completions", "all"] = "completions"
    """Which tokens are trained: the answers (all assistant turns) alone, or every token."""
    seq_len: int = Field(256, ge=8, le=1_048_576)
    """Length of a training row, tokens."""
    packing: bool = True
    """Pack several documents into a row; attention never crosses from one to another."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """Documents longer than `seq_len`: cut at the end, or dropped; both are counted and listed."""
    max_rejected_share: Share = 0.01
    """Largest share of rows that may be unusable (broken, empty, of wrong type) before the run stops."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the held-out split and of the packing order."""

    @model_validator(mode="after")
    def _revision_needs_source(self) -> "DataConfig":
        if self.revision is not None and self.source is None:
            raise ValueError(
                "revision is set but source is null: local files have no revision. Set source, or remove revision"
            )
        return self
