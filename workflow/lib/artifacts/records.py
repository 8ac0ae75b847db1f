"""The JSON files that stages exchange, as types: each field once, with its meaning.

A stage writes a record (`Record.as_json`), another reads it (`read_records.read_record`). The
comment at a field is its reference. Here are the small records; the others are in `manifest_record`
(tokens), `preflight_record`, `training_record` and `evaluation_record`."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field

from workflow.lib.settings.evaluate import GgufFormat
from workflow.lib.settings.forms import SubjectName
from workflow.lib.system.files import provenance

Interval = tuple[float, float]


class Record(BaseModel):
    """Base of all records: frozen, strict types without conversion, finite numbers, further fields
    ignored. A field with a default may be missing in a file."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    advice: ClassVar[str] = "Run the stage that writes it again."
    """Advice for a file that does not hold this record."""

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON, fields in order. Unset fields are left out."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class Provenance(Record):
    """The origin of an artifact (`files.provenance`)."""

    stage: str  # name of the stage
    commit: str | None
    """Commit of the workflow, `-dirty` appended if it had changes; null outside a checkout."""
    packages: dict[str, str]
    """Version of Python, and of every installed package that can change a result."""
    platform: str  # operating system and kind of processor
    cpu_count: int | None  # processors of the machine
    created_utc: str  # time of creation, UTC, ISO 8601

    @classmethod
    def now(cls) -> Self:
        return cls.model_validate(provenance())


class HeldoutLosses(Record):
    """Loss on held-out documents (some, and cut where they are long) of three models."""

    tokens: list[int]  # predicted tokens of each document
    original: list[float]  # Nats, summed over each document, of the model before quantization
    absmax: list[float]  # of the model in bitsandbytes' codes and scales
    calibrated: list[float]  # of the base


class CalibrationFacts(Record):
    """Data and results of a calibration."""

    tokens: int  # calibration tokens
    heldout: HeldoutLosses  # the cost of 4 bits


class Sensitivities(Record):
    """What 4 bits cost of the loss, by weight, written by `measure_sensitivity`: a diagonal Fisher
    estimate."""

    advice: ClassVar[str] = "Delete it and repeat the command; measure_sensitivity makes it again."

    tokens: dict[str, int]  # predicted tokens by kind of text
    nats: dict[str, dict[str, float]]  # per token, by kind of text, and path of a linear or stack
    model_files: dict[str, str]
    """SHA-256 of each file of the original's weights, of the bytes that were read."""
    device: str  # `cuda` or `cpu`
    provenance: Provenance  # origin of the file


class Quantization(Record):
    """`quantization.json` of a base folder, written by `quantize_base`."""

    advice: ClassVar[str] = "Delete the base's folder below results/base; it is made again."

    quantized_linears: int  # linears in NF4
    quantized_stacks: int = 0
    """Stacks of experts in NF4: one for each projection of all experts of a layer."""
    quantized_parameters: int  # weights of both
    total_bytes: int  # bytes of all weights, the others included
    settings: dict[str, Any]  # section `quantize`
    kept: int = 0  # linears and stacks in 16 bits beside them
    method: Literal["absmax", "calibrated", "none"]  # of codes and scales
    method_reason: str | None = None
    """The reason, with `quantize.method: auto`, or of a base that is in NF4 already."""
    device: str  # `cuda` or `cpu`
    auto_class: str = "AutoModelForCausalLM"
    """Transformers' class that loads this base and its original."""
    in_16_bits: list[str] = Field(default_factory=list)
    """Linears outside of NF4, or ends of their paths: none if it is the head alone."""
    taken: bool = False  # whether the original is in NF4 itself, with these bytes
    only_here: str | None = "how they were made is not recorded"
    """Why Transformers makes other 4-bit weights of the original; null: it makes these."""
    calibration: CalibrationFacts | None = None  # if it was calibrated
    model_files: dict[str, str] = Field(default={})
    """SHA-256 of each file of the original's weights, of the bytes that were read."""
    provenance: Provenance  # origin of the file


Split = Literal["train", "heldout"]


class ScoreShard(Record):
    """Scores of some neighbouring rows or documents."""

    split: Split  # training rows, or held-out documents
    first: int  # number of the first row or document
    count: int  # rows or documents
    tokens: int  # trained tokens in them
    files: dict[str, str]  # SHA-256 of each file, by its array


class ScoresManifest(Record):
    """`manifest.json` of a folder of scores, written by `score_tokens`: the scored tokens, the
    model, and the files."""

    advice: ClassVar[str] = "Delete its folder and repeat the command; score_tokens makes it again."

    format_version: int  # of the folder
    model: str  # the model, as the settings name it
    model_files: dict[str, str]
    """SHA-256 of each file of the model and its adapter that the scores depend on."""
    tokens: str  # hash of the tokens: their ids, positions and masks
    top_k: int  # likeliest tokens of each position that are stored; 0: the log-probability alone
    way: str  # how the model ran: whole in memory, or layer by layer
    device: str  # device of the computation
    compute_dtype: str  # its dtype
    mean_log_prob: float | None  # of all trained tokens of the training rows; null without any
    shards: tuple[ScoreShard, ...]  # in the order of their rows and documents
    provenance: Provenance  # origin of the folder


# Infinite where a logit is not finite: such an export fails, and its record is not written.
Magnitude = Annotated[float, AllowInfNan(True)]


class Parity(Record):
    """`consolidate/parity.json`: the exported adapter beside the trained one."""

    passed: bool  # whether the values are the same and the logits within the tolerance
    identical_values: bool  # whether the exported adapter has the trained values, bit by bit
    rms_difference: Magnitude
    """Root mean square of the differences of logits, reloaded against trained."""
    tolerance: Magnitude  # the difference allowed: `relative_tolerance` times `rms_logit`
    relative_tolerance: float  # share of `rms_logit` that is allowed in this compute dtype
    rms_logit: Magnitude  # root mean square of the trained logits
    adapter_effect: Magnitude  # root mean square of the adapter's change to the logits
    argmax_agreement: float  # share of positions with the same most likely token
    rows: int  # documents compared
    positions: int  # positions compared
    compute_dtype: str  # type of the computation
    reference: str  # the compared reference, in words
    reloaded: str  # the compared model, in words
    provenance: Provenance  # origin of the file


class GgufFile(Record):
    """A GGUF file, as llama.cpp runs it, beside the same model in Transformers."""

    form: str
    """`merged`: the merged model; `adapter`: the base, over which the adapter's file is loaded."""
    format: GgufFormat  # how its weights are stored
    file: str  # its name
    bytes: int  # its size
    adapter: str | None  # name of the adapter's file; None for the merged model
    adapter_bytes: int | None  # its size
    prompts: int
    """Conversations and texts whose token ids are equal in llama.cpp and in Transformers."""
    loss: float  # llama.cpp's nats per compared token
    reference_loss: float  # Transformers', in float32
    bound: float  # largest allowed difference of the two in this format
    tokens: int  # tokens of held-out documents compared
    answers: int  # held-out prompts answered greedily by both
    equal_answers: int  # equal answers, token by token


class GgufChecks(Record):
    """`convert_gguf/gguf.json`."""

    files: list[GgufFile]  # each form in each format
    provenance: Provenance  # origin of the file


class ReaderCheck(Record):
    """`convert_merged/<form>.json`: two readers of a converted model on held-out documents."""

    form: SubjectName  # the form
    bytes: int  # size of its weights
    documents: int  # documents compared
    tokens: int  # their trained tokens
    loss: float  # nats per token, by stock Transformers and the format's own package
    decoded_loss: float  # the same by the evaluation, which decodes the files itself
    worst_document: float  # largest difference of a document's loss, nats per token
    bound: float  # largest allowed difference
    compute_dtype: str  # type of the computation
    provenance: Provenance  # origin of the file

    @property
    def summary(self) -> str:
        """The results in a line."""
        return (
            f"loss of {self.documents} held-out documents {self.loss:.4f} nats per token in stock "
            f"Transformers, {self.decoded_loss:.4f} in the evaluation, a document at most "
            f"{self.worst_document:.2g} apart"
        )


class AdapterEffect(Record):
    """What an adapter changes, served and in PEFT: root mean squares over tokens, nats."""

    effect: float  # its change to the log-probabilities in PEFT
    served_effect: float  # its change to those of the server
    share: float
    """The served change along PEFT's, as its share: 1 the same, 0 ignored."""
    difference: float  # log-probabilities of the server - those of PEFT


class ServedCheck(Record):
    """`check_served/served.json`: a server's results on the exported files."""

    server: str  # its name and version
    subject: SubjectName  # the served model
    compute_dtype: str  # type of its computation, or the format of the GGUF file
    max_lora_rank: int | None  # its largest rank as it was started; null for a merged model
    documents: int  # held-out documents: all of the evaluation; the first ones with GGUF
    loss: float  # nats per trained token, by the server
    evaluated_loss: float  # the same by the evaluation
    trained_loss: float | None
    """The same of the adapter on the base of its training; null if not measured."""
    bound: float
    """Nats: largest allowed difference of a document's loss and of the adapter's effect; of a GGUF
    file that of the mean loss."""
    worst_document: float  # largest difference of a document's loss, nats per token
    prompts: int  # conversations and texts with the token ids of the training
    answers: int  # held-out prompts that it answered greedily
    equal_answers: int  # answers equal to the evaluation's
    answer_gap: float
    """Largest difference, nats in Transformers, between the most likely token and the token of its
    greedy answers."""
    adapter: AdapterEffect | None = None  # null for a merged model
    provenance: Provenance  # origin of the file

    @property
    def cost(self) -> float | None:
        """Nats per token that serving costs against training; None if not measured."""
        return None if self.trained_loss is None else self.loss - self.trained_loss

    @property
    def summary(self) -> str:
        """The results in a line."""
        acts = "" if self.adapter is None else f"{self.adapter.share:.1%}"
        return (
            f"loss of {self.documents} held-out documents {self.loss:.4f} nats per token, by the "
            f"evaluation {self.evaluated_loss:.4f} ({self.bound:.2g} allowed), a document at most "
            f"{self.worst_document:.2g} apart; {self.prompts} prompts with the same token ids; "
            f"{self.equal_answers} of {self.answers} greedy answers the same"
            + (f"; {acts} of the adapter's change of log-probabilities" if acts else "")
        )
