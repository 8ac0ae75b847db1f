"""The artifacts that the report reads: one type per file, exactly the fields that are shown.

The fields and their meanings are those of `docs/artifacts.md`; an artifact may hold more. Types are
strict and numbers finite, and values are kept as they are: no rounding, no conversion. Reading is
in `read_records`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Interval = tuple[float, float]

# What people read in place of an evaluation's `subject`: the measured base is the quantized one.
SUBJECT_LABELS = {"base": "NF4 base", "tuned": "tuned", "merged": "merged"}


class Record(BaseModel):
    """Base of all records: frozen, strict types, finite numbers, further fields ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class Provenance(Record):
    """What made an artifact (`files.provenance`)."""

    stage: str
    commit: str | None
    packages: dict[str, str]
    platform: str
    cpu_count: int | None
    created_utc: str


class Check(Record):
    """A claim that the run tested about itself."""

    name: str
    passed: bool
    detail: str


class PeakBytes(Record):
    """Peak memory of the fullest process."""

    predicted: int
    measured: int
    kind: Literal["cuda_allocated", "host_rss"]


class ModelSettings(Record, extra="allow"):
    """Section `model` as it was trained; `source` is the folder or hub id of the base, `name` its
    label.
    """

    name: str
    source: str


class AdapterSettings(Record, extra="allow"):
    """Section `lora` as it was trained; `r` is the rank."""

    r: int
    modules_to_save: tuple[str, ...] = ()
    """Written only where there are some."""


class TrainedSettings(Record):
    """The sections of the configuration that training read, all their keys."""

    model: ModelSettings
    lora: AdapterSettings
    train: dict[str, Any]


class Summary(Record):
    """`finetune/summary.json`."""

    run: str
    fingerprint: str
    device: str
    device_name: str
    processes: int
    num_steps: int
    resumed_from_steps: list[int]
    settings: TrainedSettings
    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    seq_len: int
    trainable_parameters: int
    total_parameters: int
    first_loss: float
    final_loss: float
    tokens: int
    trained_tokens: int
    elapsed_s: float
    tokens_per_s: float
    peak_bytes: PeakBytes
    checks: list[Check]
    selected_step: int | None = None
    provenance: Provenance

    @property
    def device_hours(self) -> float:
        """Hours of training, summed over the processes: GPU hours where `device` is cuda."""
        return self.processes * self.elapsed_s / 3600


class Step(Record):
    """A line of `finetune/metrics.jsonl`."""

    step: Annotated[int, Field(ge=1)]
    loss: float
    grad_norm: float
    learning_rate: float
    trained_tokens: int
    tokens: int
    tokens_per_s: float
    peak_bytes: int
    elapsed_s: float
    repeats: int | None = None
    heldout_loss: float | None = None


class Plan(Record):
    """How preflight runs the training."""

    device: str
    processes: int
    nodes: int
    shard_size: int
    micro_batch_size: int
    accumulation_steps: int
    activation_checkpointing: bool | int
    reshard_after_forward: bool
    offload_embedding: bool
    gpu_memory_bytes: int | None
    compute_dtype: str
    num_steps: int
    offload_activations: bool | int = False
    offload_window_bytes: int | None = None
    offload_layers: int = 0


class Term(Record):
    """One addend of the predicted peak."""

    name: str
    bytes: int
    explanation: str


class Estimate(Record):
    """Predicted time; None where the speed of the GPU is not known, as `basis` then says."""

    total_h: float | None
    basis: str


class Candidate(Record):
    """A plan that preflight tried; `relative_time` is that of a step, 1 for the chosen one."""

    micro_batch_size: int
    recomputation: str
    relative_time: float
    why: str
    peak_bytes: int
    fits: bool
    offload_activations: bool | int = False
    offload_layers: int = 0
    reshard_after_forward: bool = True


class Preflight(Record):
    """`preflight_run/preflight.json`."""

    verdict: Literal["fits", "does_not_fit"]
    reason: str
    plan: Plan
    terms: list[Term]
    phases: dict[str, int]
    peak_bytes: int
    reserved_bytes: int
    outside_allocator_bytes: int
    capacity_bytes: int
    margin_bytes: int
    host_bytes: int
    host_capacity_bytes: int | None
    disk_bytes: dict[str, int]
    disk_free_bytes: int
    time: Estimate
    candidates: list[Candidate]
    model: dict[str, Any]
    provenance: Provenance


class Parity(Record):
    """`consolidate/parity.json`."""

    max_abs_difference: float
    tolerance: float
    passed: bool
    rows: int
    positions: int
    compute_dtype: str
    max_abs_logit: float
    argmax_agreement: float


class SourceLoss(Record):
    """Loss on some held-out documents, nats per trained token; one document has no interval."""

    loss: float
    loss_ci95: Interval | None
    perplexity: float
    documents: int
    trained_tokens: int


class Heldout(SourceLoss):
    """Loss on all held-out documents, and by their source."""

    loss_ci95: Interval
    sources: dict[str, SourceLoss]


class Metric(Record):
    """A task's score."""

    value: float
    stderr: float | None
    higher_is_better: bool | None


class Task(Record):
    """A task's scores by metric."""

    metrics: dict[str, Metric]
    items: int
    version: int | float | str | None


class Sample(Record):
    """A held-out prompt with the answer of one subject; `drawn` at `evaluate.sample_temperature`,
    if that is set.
    """

    document: int
    prompt: str
    reference: str
    answer: str
    drawn: str | None


class MetricDifference(Record):
    """Paired difference of a task metric, tuned - NF4 base; `gained` and `lost` count items where
    right is 1 and wrong 0.
    """

    difference: float
    difference_ci95: Interval | None
    p_value: float | None
    test: str | None
    gained: int | None
    lost: int | None


class LossDifference(Record):
    """Paired difference over documents, NF4 base - tuned, so positive is better; None where nothing
    was measured.
    """

    loss_difference: float | None
    loss_difference_ci95: Interval | None
    p_value: float | None
    documents: int


class Comparison(LossDifference):
    """Paired comparison of two subjects: all documents, by source, and tasks."""

    sources: dict[str, LossDifference]
    tasks: dict[str, dict[str, MetricDifference]]


class Evaluation(Record):
    """`evaluate_run/base.json`."""

    subject: Literal["base", "tuned", "merged"]
    run: str
    heldout: Heldout | None
    tasks: dict[str, Task]
    samples: list[Sample]
    provenance: Provenance


class TunedEvaluation(Evaluation):
    """`evaluate_run/tuned.json`."""

    comparison: Comparison


class MergedEvaluation(TunedEvaluation):
    """`evaluate_run/merged.json`, where `export.merged` is set; `merging` compares with tuned: what
    merging cost.
    """

    merging: Comparison


class Source(Record):
    """A raw data file; its counts are of what was kept, `token_share` is its part of its split's
    tokens.
    """

    file: str
    sha256: str
    rows: int
    split: str | None = None
    documents: int | None = None
    tokens: int | None = None
    trained_tokens: int | None = None
    token_share: float | None = None


class Percentiles(Record):
    """Document lengths, tokens."""

    p50: float
    p90: float
    p99: float
    max: float


class Histogram(Record):
    """Documents by length, tokens: `counts[i]` have at least `edges[i]` and fewer than `edges[i +
    1]`.
    """

    edges: list[int]
    counts: list[int]


class LongRow(Record):
    """One of the longest rows, in tokens before any cut."""

    file: str
    row: int
    tokens: int


class Split(Record):
    """Counts of one split; of its rows, `near_duplicates` resemble an earlier one and do not equal
    it.
    """

    rows_read: int
    rows_kept: int
    rows_dropped: int
    truncated: int
    tokens: int
    trained_tokens: int
    length_percentiles: Percentiles
    duplicates: int
    near_duplicates: int | None = None
    length_histogram: Histogram | None = None
    longest: list[LongRow] = []


class TrainSplit(Split):
    """The packed training split; `fill` is the share of row positions that hold a token."""

    packed_rows: int
    fill: float


class HeldoutSplit(Split):
    """The held-out split, unpacked."""

    documents: int


class Splits(Record):
    """Both splits."""

    train: TrainSplit
    heldout: HeldoutSplit


class TokenFiles(Record):
    """SHA-256 of the files of a tokens folder; equal held-out tokens make losses comparable."""

    heldout_input_ids: str = Field(alias="heldout.input_ids.npy")


class Manifest(Record):
    """`manifest.json` of a tokens folder."""

    format_version: Literal[1]
    seq_len: int
    vocab_size: int
    format: str
    tokenizer_sha256: str
    chat_template_sha256: str | None
    sources: list[Source]
    splits: Splits
    dropped_by_reason: dict[str, int]
    train_heldout_overlap: int | None = None
    """Held-out rows that were dropped because their tokens equal those of a training row."""
    train_heldout_near_duplicates: int | None = None
    """Held-out rows that resemble a training row; removed, or kept, as `data.near_duplicates`
    says."""
    files: TokenFiles
    samples: list[list[tuple[str, bool]]]
    provenance: Provenance


class Probe(Record):
    """A text, or a conversation, with the token ids that it would have been trained as."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    ids: list[int]

    @property
    def described(self) -> str:
        """What it is, in words."""
        if self.messages is None:
            return "a text"
        roles = ", ".join(str(message["role"]) for message in self.messages)
        return f"a conversation ({roles})"


class ConversationFacts(Record):
    """What `manifest.json` says of how conversations are written and where an answer ends."""

    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int
    pad_token_id: int
    end_of_turn_token_ids: list[int]
    probes: list[Probe]
