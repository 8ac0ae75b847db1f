"""`finetune/summary.json` and `finetune/metrics.jsonl`, written by `training.run_record`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from workflow.lib.artifacts.records import Provenance, Record


class Check(Record):
    """A claim that the run checked about itself."""

    name: str  # the claim
    passed: bool  # whether it held
    detail: str  # its numbers


class Times(Record):
    """Seconds of the last start of a run, on its main process."""

    predicted_step_s: float | None  # of an optimizer step, as planned; none: speed unknown
    measured_step_s: float | None  # median without the first; none: no other step
    parts_s: dict[str, float]  # by use, without loading and checks


class PeakBytes(Record):
    """Peak memory of the fullest process."""

    predicted: int  # by preflight
    measured: int  # measured
    kind: Literal["cuda_allocated", "host_rss"]
    """The measured memory: allocated on the GPU, or the resident set of the process."""


class SkippedCheckpoint(Record):
    """A checkpoint from which the run could not resume."""

    step: int  # its step
    reason: str  # its fault


class ModelSettings(Record, extra="allow"):
    """Section `model` of the training."""

    name: str  # label of the base
    source: str  # folder or hub id of the base
    add_tokens: tuple[str, ...] = ()
    """Tokens with added and trained rows. Written only if there are some."""


class AdapterSettings(Record, extra="allow"):
    """Section `lora` of the training."""

    r: int  # rank
    modules_to_save: tuple[str, ...] = ()
    """Modules trained whole. Written only if there are some."""


class TrainedSettings(Record):
    """The sections of the configuration that training read, all their keys."""

    model: ModelSettings  # section `model`
    lora: AdapterSettings  # section `lora`
    train: dict[str, Any]  # section `train`
    preferences: dict[str, Any] = Field(default={})
    """Section `preferences`, of runs that train them."""
    distill: dict[str, Any] = Field(default={})  # section `distill`, of runs with a teacher
    grpo: dict[str, Any] = Field(default={})  # section `grpo`, of runs on groups


class Ancestor(Record):
    """An ancestor of a run: another run, or an adapter from elsewhere."""

    run: str | None = None  # name of the run
    data: str | None = None  # label of its data
    objective: str | None = None  # its objective
    adapter: str | None = None  # folder or hub id of an adapter from elsewhere

    @property
    def label(self) -> str:
        return f"run {self.run}: {self.objective} on {self.data}" if self.run else f"{self.adapter}"


class Summary(Record):
    """`finetune/summary.json`."""

    run: str  # name of the run
    fingerprint: str  # id of the run's settings, data and base, as in its checkpoints' folder
    base: str  # folder of the NF4 base
    device: str  # `cuda` or `cpu`
    device_name: str  # name of the GPU, or `CPU`
    processes: int  # processes that trained
    num_steps: int  # optimizer steps
    planned_steps: int | None = None
    """Optimizer steps without early stopping. Written only if it ended the run."""
    resumed_from_steps: list[int]  # the last step before each interruption
    skipped_checkpoints: list[SkippedCheckpoint] = Field(default=[])
    """Checkpoints that were damaged."""
    returns: list[tuple[int, int]] = Field(default=[])
    """Returns of the user: from which step to which. Written only if there was one."""
    settings: TrainedSettings  # settings of the training
    global_batch_size: int  # rows of an optimizer step, over all processes
    micro_batch_size: int  # rows of a process in one forward
    accumulation_steps: int  # forwards of a process in an optimizer step
    seq_len: int  # tokens of a row
    trainable_parameters: int  # trained parameters
    trainable_by_module: dict[str, int] = Field(default={})
    """The same by the kind of module that holds them (`self_attn`, `experts`)."""
    total_parameters: int  # all parameters, including the base's
    lineage: list[Ancestor] = Field(default=[])
    """The ancestors of the run's start adapter, from the first; only with a start adapter."""
    bytes_read_by_main_process: int | None = None  # bytes of the base that the main process read
    first_loss: float  # loss of the first step, nats per trained token
    final_loss: float  # mean loss of the last 10% of the logged steps, nats per trained token
    first_router_aux_loss: float | None = None
    """Load-balancing loss of the first step, of a mixture with balanced routers."""
    final_router_aux_loss: float | None = None  # the same, mean of the last 10% of the logged steps
    tokens: int  # positions of all rows of all steps, padding included
    trained_tokens: int  # prediction targets of all steps
    elapsed_s: float  # seconds of training, over all starts
    process_s: float  # the same times the processes of each start
    energy_j: float | None = None
    """Joules of the host's GPUs during the training, by NVML; null without one, and if the training
    was interrupted."""
    logged_steps: int  # lines of `metrics.jsonl`
    parity_sha256: str  # SHA-256 of `parity.safetensors`
    tokens_per_s: float  # `tokens` a second, over all processes
    graphs_off: str | None = None  # why micro-batches, which were to be CUDA graphs, were none
    peak_bytes: PeakBytes  # predicted and measured peak memory
    times: Times  # predicted and measured time
    selected_step: int | None = None  # step of the selected adapter
    checks: list[Check]  # checks of the run on itself
    provenance: Provenance  # origin of the file

    @property
    def device_hours(self) -> float:
        """Hours of training, summed over the processes: GPU hours where `device` is cuda."""
        return self.process_s / 3600


class Step(Record):
    """A line of `finetune/metrics.jsonl`: a logged step, with counts over all processes."""

    step: Annotated[int, Field(ge=1)]  # number of the optimizer step, from 1
    loss: float  # mean loss of a trained token, a pair or an answer (nats)
    grad_norm: float  # norm of the gradient before it is clipped
    learning_rate: float  # learning rate of the step
    trained_tokens: int  # prediction targets of the step
    tokens: int  # positions of the step's rows, padding included
    tokens_per_s: float  # `tokens` a second
    peak_bytes: int  # peak memory so far, of the process that logs
    elapsed_s: float  # seconds of training so far
    router_aux_loss: float | None = None
    """Of a mixture with balanced routers: the step's load-balancing loss. With equal loads it is
    about the number of experts per token, else more. Without its coefficient, and not part of
    `loss`."""
    repeats: int | None = None
    """In float16: steps so far that were repeated with a smaller loss scale."""
    heldout_loss: float | None = None  # held-out loss after the step, where it was measured
    heldout_losses: dict[str, float] | None = None  # the same by source, of several
    reward_chosen: float | None = None
    """Of pairs: mean reward of chosen answers, beta (log p - log p_ref) if there is one."""
    reward_rejected: float | None = None  # the same of rejected ones
    reward_margin: float | None = None  # mean difference of the two
    reward_accuracy: float | None = None  # share of pairs whose chosen answer has the higher reward
    log_probs_chosen: float | None = None  # of pairs: mean log p of chosen answers, nats
    log_probs_rejected: float | None = None  # the same of rejected ones
    reward_desirable: float | None = None  # of rated answers: mean reward of desirable ones
    reward_undesirable: float | None = None  # the same of undesirable ones
    log_probs_desirable: float | None = None  # of rated answers: mean log p of desirable ones, nats
    log_probs_undesirable: float | None = None  # the same of undesirable ones
    kl: float | None = None
    """Of rated answers: mean log p - log p_ref of mismatched ones, an estimate of KL, nats."""
    reference_kl: float | None = None
    """Of groups: estimate of KL to the reference, nats per token."""
    clipped: float | None = None  # of groups: share of trained tokens whose ratio is clipped
    ratio: float | None = None
    """Of groups: mean probability of a trained token, divided by the one at the run's start."""
    entropy: float | None = None
    """Of groups: mean -log p of trained tokens, which were sampled: an estimate of entropy."""
    importance: float | None = None
    """Of groups: mean weight for the difference of sampler and trainer."""
    teacher_kl: float | None = None
    """Of distillation: KL of the student to the teacher, nats per trained token."""
    sft_loss: float | None = None  # of distillation: supervised loss, nats per trained token
