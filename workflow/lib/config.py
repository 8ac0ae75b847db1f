"""Every setting of the workflow: its type, bound, unit, default and effect.

One frozen pydantic model per section; the docstring under a field is its only documentation, from
which the JSON schema, the reference table and `config.yaml`'s comments are checked. `load_config`
turns the YAML document into one `RunConfig` per run (`runs:` overrides any setting), so everything
downstream sees complete, validated values. Imports no torch and reads nothing but the document.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from workflow.lib.config_errors import explain, is_section
from workflow.lib.errors import UserError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1, le=10**9)]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, field docstrings become descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, document: Any) -> Any:
        """Let a section with nothing below it (null in YAML) mean its defaults."""
        if not isinstance(document, Mapping):
            return document
        return {k: v for k, v in document.items() if v is not None or not is_section(cls, k)}


SectionT = TypeVar("SectionT", bound=Section)


class ModelConfig(Section):
    """The base model."""

    name: Name = "pydocs-base"
    """Label of the base model; part of its artifacts' folder names."""
    source: str = Field("workflow/resources/base", min_length=1, max_length=1024)
    """Local directory (config.json, tokenizer, *.safetensors), or a Hugging Face hub id `owner/name`."""
    revision: str | None = Field(None, min_length=1, max_length=256)
    """Hub branch, tag or commit (hub ids only; null = `main`). It is resolved to a commit once and recorded."""
    attention: Literal[
        "auto", "eager", "sdpa", "varlen", "flash_attention_2", "flash_attention_3"
    ] = "auto"
    """Attention implementation; `auto` = on a GPU flash_attention_2 if its package is installed, else varlen (FlashAttention as built into torch; evaluation takes sdpa for it); on a CPU sdpa."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of activations and matrix products; `auto` = bfloat16 on GPUs, float32 on CPUs."""


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


class QuantizeConfig(Section):
    """NF4 quantization of the base (QLoRA, arXiv 2305.14314)."""

    block_size: Literal[64, 128, 256, 512] = 64
    """Weights that share one scale (absmax)."""
    double_quant: bool = True
    """Quantize the scales too: 0.127 instead of 0.5 bits per weight of overhead at block size 64."""


class LoraSettings(Section):
    """The adapter (LoRA, arXiv 2106.09685), as PEFT understands it."""

    r: int = Field(16, ge=1, le=1024)
    """Rank of the update."""
    alpha: float = Field(32.0, gt=0.0, le=65536.0)
    """Scale numerator: the update is multiplied by alpha / r (alpha / sqrt(r) with `use_rslora`)."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout on the adapter's input, probability. At 0 one fused operation replaces PEFT's own, faster and with less memory."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get an adapter (last component of their path), or `all-linear`."""
    use_rslora: bool = False
    """Rank-stabilized scale, arXiv 2312.03732."""

    @model_validator(mode="after")
    def _some_target(self) -> "LoraSettings":
        if not self.target_modules or not all(self.target_modules):
            raise ValueError(
                "target_modules has an empty name or none at all: name at least one linear layer, or all-linear"
            )
        return self


class TrainConfig(Section):
    """The optimization."""

    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of adapter initialization, data order and dropout."""
    epochs: float | None = Field(3.0, gt=0.0, le=1000.0)
    """Passes over the training rows; null if `max_steps` is set."""
    max_steps: int | None = Field(None, ge=1, le=10**9)
    """Optimizer steps; set exactly one of `epochs` and `max_steps`, the other to null."""
    global_batch_size: int = Field(16, ge=1, le=2**20)
    """Rows per optimizer step over all processes; the number of GPUs does not change it."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Rows per process and forward pass; `auto` = the largest that preflight fits. A divisor of the rows per process."""
    learning_rate: float = Field(2e-4, gt=0.0, le=1.0)
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up."""
    warmup_share: Share = 0.03
    """Share of steps in which the rate rises linearly from 0."""
    min_lr_share: Share = 0.0
    """Final learning rate as a share of the peak (cosine and linear)."""
    weight_decay: float = Field(0.0, ge=0.0, le=1.0)
    """AdamW weight decay of the adapter."""
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """AdamW first-moment decay."""
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """AdamW second-moment decay."""
    adam_eps: float = Field(1e-8, gt=0.0, le=1e-2)
    """AdamW denominator term."""
    max_grad_norm: float | None = Field(1.0, gt=0.0)
    """Clip the global gradient norm to this; null = no clipping (the norm is logged anyway)."""
    activation_checkpointing: bool = True
    """Recompute activations in backward instead of keeping them."""
    checkpoint_every_steps: int = Field(50, ge=1, le=10**9)
    """Optimizer steps between checkpoints. Does not change the result."""
    keep_checkpoints: int = Field(2, ge=1, le=1000)
    """Newest checkpoints kept while training. Does not change the result."""
    log_every_steps: int = Field(1, ge=1, le=10**9)
    """Optimizer steps between lines of metrics.jsonl. Does not change the result."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        if (self.epochs is None) == (self.max_steps is None):
            raise ValueError(
                f"epochs = {self.epochs} and max_steps = {self.max_steps}: exactly one sets the length. "
                "Set the other to null"
            )
        if (
            self.micro_batch_size != "auto"
            and not 1 <= self.micro_batch_size <= self.global_batch_size
        ):
            raise ValueError(
                f"micro_batch_size = {self.micro_batch_size}: must be between 1 and "
                f"global_batch_size = {self.global_batch_size}. Lower it, or set auto"
            )
        return self


class HardwareConfig(Section):
    """What a run may use. Changing it never retrains a finished run: results do not depend on it."""

    gpus: int | Literal["auto"] = Field("auto", union_mode="left_to_right")
    """GPUs of a run; `auto` = all visible ones; 0 = train on the CPU."""
    cpu_processes: int = Field(2, ge=1, le=64)
    """Processes (gloo ranks) when no GPU is used."""
    gpu_memory_gib: float | Literal["auto"] = "auto"
    """Memory of each GPU that may be used, GiB; `auto` = what the driver reports. A smaller value is enforced."""
    host_memory_gib: float | Literal["auto"] = "auto"
    """Host memory that may be used by all processes together, GiB; `auto` = what is available."""
    memory_margin_gib: float = Field(0.5, ge=0.0, le=64.0)
    """GPU memory that must stay free in the prediction, GiB."""
    reshard_after_forward: bool = True
    """Free gathered weights after forward (FULL_SHARD); false = keep them to backward (SHARD_GRAD_OP)."""

    @model_validator(mode="after")
    def _positive(self) -> "HardwareConfig":
        if self.gpus != "auto" and not 0 <= self.gpus <= 4096:
            raise ValueError(
                f"gpus = {self.gpus}: must be 0 to 4096. Set auto to use all visible GPUs"
            )
        for key in ("gpu_memory_gib", "host_memory_gib"):
            value = getattr(self, key)
            if value != "auto" and value <= 0:
                raise ValueError(f"{key} = {value}: must be above 0. Set auto to use what is there")
        return self


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


class RunConfig(Section):
    """All settings of one run."""

    model: ModelConfig = ModelConfig()
    """The base model."""
    data: DataConfig = DataConfig()
    """The dataset and how it becomes tokens."""
    quantize: QuantizeConfig = QuantizeConfig()
    """NF4 quantization of the base."""
    lora: LoraSettings = LoraSettings()
    """The adapter."""
    train: TrainConfig = TrainConfig()
    """The optimization."""
    hardware: HardwareConfig = HardwareConfig()
    """What a run may use."""
    export: ExportConfig = ExportConfig()
    """What is exported."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """What is measured."""


class Config(RunConfig):
    """The whole document: shared settings, the report, and the runs that override them."""

    report: ReportConfig = ReportConfig()
    """The report over all runs."""
    runs: dict[Name, dict[str, Any] | None] = Field({"demo": {}}, min_length=1)
    """One entry per run: settings that differ from the shared ones (same keys); {} = none."""


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `override` laid over it, section by section; lists are replaced.

    A section with nothing below it (null) overrides nothing.
    """
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping | None):
            value = merge(old, value or {})
        merged[key] = value
    return merged


def load_config(document: Mapping[str, Any]) -> tuple[ReportConfig, dict[str, RunConfig]]:
    """Validate a parsed `config.yaml`; return the report's settings and every run's, by name.

    Raises `UserError` naming each wrong key's path, its value, the bound, and the nearest valid key.
    """
    config = _validate(Config, document, prefix="")
    shared = {key: document[key] for key in RunConfig.model_fields if key in document}
    runs = {
        name: _validate(RunConfig, merge(shared, override or {}), prefix=f"runs.{name}.")
        for name, override in config.runs.items()
    }
    return config.report, runs


def _validate(model: type[SectionT], document: Mapping[str, Any], *, prefix: str) -> SectionT:
    try:
        return model.model_validate(dict(document))
    except ValidationError as error:
        lines = [prefix + line for line in explain(model, document, error)]
        raise UserError("config.yaml is not valid:\n  " + "\n  ".join(lines)) from None


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of `config.yaml`, for editors."""
    return Config.model_json_schema()


def check_local_paths(name: str, run: RunConfig) -> None:
    """Raise `UserError` if a local path that the run names does not exist. Hub ids are not looked up."""
    paths = {
        "data.chat_template": run.data.chat_template,
        "evaluate.tasks_dir": run.evaluate.tasks_dir,
    }
    if run.data.source is None:
        paths |= {"data.train": run.data.train, "data.heldout": run.data.heldout}
    if not is_hub_id(run.model.source):
        paths["model.source"] = run.model.source
        if run.model.revision is not None:
            raise UserError(
                f"model.revision = {run.model.revision!r} (run {name}): model.source = {run.model.source!r} "
                "is a local directory, which has no revision. Remove revision, or name a hub id."
            )
    for key, value in paths.items():
        if value is not None and not Path(value).exists():
            raise UserError(
                f"{key} = {value!r} (run {name}): there is no such file or folder. "
                "Give a path that exists, relative to the folder you run in"
                + (", or a hub id of the form owner/name." if key == "model.source" else ".")
            )


def is_hub_id(source: str) -> bool:
    """Tell whether `source` names a hub repository: `owner/name`, and no local path of that name exists."""
    parts = source.split("/")
    looks_like_id = len(parts) == 2 and all(parts) and not source.startswith((".", "~"))
    return looks_like_id and not Path(source).exists()
