"""Settings of what follows training: export, evaluation and report."""

from typing import Literal

from pydantic import Field

from workflow.lib.section import Section


class ExportConfig(Section):
    """What `consolidate` leaves besides the adapter."""

    merged: bool = False
    """Also write a merged bf16 model (streamed, one shard in memory at a time)."""
    merge_onto: Literal["dequantized", "original"] = "dequantized"
    """Weights that the adapter is merged into: the NF4 ones it was trained on, or the original ones."""
    shard_gib: float = Field(1.0, gt=0.0, le=64.0)
    """Largest file of the merged model, GiB."""


class EvaluateConfig(Section):
    """What is measured on the exported adapter and on the base."""

    heldout: bool = True
    """Held-out loss and perplexity per trained token, with intervals."""
    max_documents: int | None = Field(None, ge=1)
    """Held-out documents used at most; null = all."""
    bootstrap_resamples: int = Field(1000, ge=100, le=100_000)
    """Bootstrap resamples over documents for 95% intervals."""
    tasks: tuple[str, ...] = ("pydocs_mc",)
    """lm-evaluation-harness tasks, by name; local ones are looked up in `tasks_dir` first."""
    tasks_dir: str | None = "workflow/resources/tasks"
    """Folder with task YAML files; null = only the tasks shipped with the harness."""
    task_code: bool = False
    """Let task files of `tasks_dir` run Python that they name (`!function`, `class`); they can do whatever you can."""
    task_limit: int | None = Field(None, ge=1)
    """Items per task at most; null = all."""
    num_fewshot: int = Field(0, ge=0, le=64)
    """Examples before each task item."""
    apply_chat_template: bool = True
    """Wrap task items in the tokenizer's chat template."""
    samples: int = Field(8, ge=0, le=1000)
    """Held-out prompts answered by base and tuned, greedily, for reading side by side."""
    max_new_tokens: int = Field(96, ge=1, le=8192)
    """Length of a sample answer at most, tokens."""
    batch_size: int = Field(16, ge=1, le=4096)
    """Sequences per forward pass."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of bootstrap and choice of samples."""


class ReportConfig(Section):
    """The report."""

    title: str = Field("Fine-tuning report", min_length=1, max_length=200)
    """Title of the page."""
    max_samples: int = Field(8, ge=0, le=1000)
    """Sample answers shown per run."""
