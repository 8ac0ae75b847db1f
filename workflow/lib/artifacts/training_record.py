"""`finetune/summary.json` and `finetune/metrics.jsonl`, written by `training.run_record`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from workflow.lib.artifacts.records import Provenance, Record


class Check(Record):
    """A claim that the run tested about itself."""

    name: str
    """The claim."""
    passed: bool
    """Whether it held."""
    detail: str
    """The numbers behind it."""


class PeakBytes(Record):
    """Peak memory of the fullest process."""

    predicted: int
    """As preflight predicted it."""
    measured: int
    """As it was."""
    kind: Literal["cuda_allocated", "host_rss"]
    """What was measured: memory allocated on the GPU, or the resident set of the process."""


class ExpertLoad(Record):
    """Where the rows of a run went in a mixture. A token has a row for each of its experts."""

    layers: int
    """Layers with experts."""
    experts: int
    """Experts of all these layers."""
    without_tokens: int
    """Experts that no token went to: their adapters have their initial values."""
    busiest: float
    """The most rows that an expert got, as a multiple of its layer's mean."""


class SkippedCheckpoint(Record):
    """A checkpoint from which the run could not continue."""

    step: int
    """Its step."""
    reason: str
    """What was wrong with it."""


class ModelSettings(Record, extra="allow"):
    """Section `model` as it was trained."""

    name: str
    """Label of the base."""
    source: str
    """Folder or hub id of the base."""


class AdapterSettings(Record, extra="allow"):
    """Section `lora` as it was trained."""

    r: int
    """Rank."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained whole. Written only where there are some."""


class TrainedSettings(Record):
    """The sections of the configuration that training read, all their keys."""

    model: ModelSettings
    """Section `model`."""
    lora: AdapterSettings
    """Section `lora`."""
    train: dict[str, Any]
    """Section `train`."""


class Ancestor(Record):
    """What was trained before a run: another run, or an adapter from elsewhere."""

    run: str | None = None
    """Name of the run."""
    data: str | None = None
    """Label of its data."""
    objective: str | None = None
    """Its objective."""
    adapter: str | None = None
    """Folder or hub id of an adapter from elsewhere."""


class Summary(Record):
    """`finetune/summary.json`."""

    run: str
    """Name of the run."""
    fingerprint: str
    """What names the run's settings, data and base, as in its checkpoints' folder."""
    device: str
    """`cuda` or `cpu`."""
    device_name: str
    """Name of the GPU, or `CPU`."""
    processes: int
    """Processes that trained."""
    num_steps: int
    """Optimizer steps."""
    resumed_from_steps: list[int]
    """The last step before each interruption."""
    skipped_checkpoints: list[SkippedCheckpoint] = Field(default=[])
    """Checkpoints that were damaged."""
    settings: TrainedSettings
    """Settings as trained."""
    global_batch_size: int
    """Rows of an optimizer step, over all processes."""
    micro_batch_size: int
    """Rows of a process in one forward."""
    accumulation_steps: int
    """Forwards of a process in an optimizer step."""
    seq_len: int
    """Tokens of a row."""
    trainable_parameters: int
    """Parameters that were trained."""
    trainable_by_module: dict[str, int] = Field(default={})
    """The same by the kind of module that holds them (`self_attn`, `experts`)."""
    total_parameters: int
    """All parameters, those of the base included."""
    lineage: list[Ancestor] = Field(default=[])
    """What led to the adapter that the run continued, from the first; only where one was."""
    bytes_read_by_main_process: int | None = None
    """Bytes of the base that the main process read."""
    first_loss: float
    """Loss of the first step, nats per trained token."""
    final_loss: float
    """Mean loss of the last 10% of the logged steps, nats per trained token."""
    first_router_aux_loss: float | None = None
    """Load-balancing loss of the first step, of a mixture whose routers are balanced."""
    final_router_aux_loss: float | None = None
    """The same, mean of the last 10% of the logged steps."""
    tokens: int
    """Positions of all rows of all steps, padding included."""
    trained_tokens: int
    """Prediction targets of all steps."""
    elapsed_s: float
    """Seconds of training, over all starts."""
    logged_steps: int
    """Lines of `metrics.jsonl`."""
    parity_sha256: str
    """SHA-256 of `parity.safetensors`."""
    tokens_per_s: float
    """`tokens` a second, over all processes."""
    graphs_off: str | None = None
    """Why micro-batches, which were to be CUDA graphs, were none."""
    peak_bytes: PeakBytes
    """Predicted and measured peak memory."""
    expert_load: ExpertLoad | None = None
    """Of a mixture of experts: where the tokens went."""
    selected_step: int | None = None
    """The step after which the adapter was taken."""
    checks: list[Check]
    """What the run tested about itself."""
    provenance: Provenance
    """What made the file."""

    @property
    def device_hours(self) -> float:
        """Hours of training, summed over the processes: GPU hours where `device` is cuda."""
        return self.processes * self.elapsed_s / 3600


class Step(Record):
    """A line of `finetune/metrics.jsonl`: a logged step, with counts over all processes."""

    step: Annotated[int, Field(ge=1)]
    """Number of the optimizer step, from 1."""
    loss: float
    """Mean loss, nats per trained token."""
    grad_norm: float
    """Norm of the gradient before it is clipped."""
    learning_rate: float
    """Learning rate of the step."""
    trained_tokens: int
    """Prediction targets of the step."""
    tokens: int
    """Positions of the step's rows, padding included."""
    tokens_per_s: float
    """`tokens` a second."""
    peak_bytes: int
    """Peak memory so far, of the process that logs."""
    elapsed_s: float
    """Seconds of training so far."""
    router_aux_loss: float | None = None
    """Of a mixture whose routers are balanced: the load-balancing loss of the step, about the
    experts that a token has where all get equally many tokens, else more. It is without its
    coefficient, and not in `loss`."""
    repeats: int | None = None
    """In float16: steps so far that were made once more with a smaller loss scale."""
    heldout_loss: float | None = None
    """Held-out loss after the step, where it was measured."""
