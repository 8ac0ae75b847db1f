"""Settings of objectives beside supervised training: preferences, a teacher, and rewards."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from workflow.lib.settings.section_base import Affects, Section

ObjectiveName = Literal["sft", "dpo", "ipo", "simpo", "orpo", "kto", "distill", "grpo"]
Examples = Literal["texts", "pairs", "rated", "groups"]
PAIRED: tuple[Examples, ...] = ("pairs", "rated")  # of two documents
Normalization = Literal["token", "answer", "constant"]
PairLoss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
]
SMOOTHED: tuple[PairLoss, ...] = ("sigmoid", "robust", "exo_pair")
START = "start"
ScoredModel = Annotated[str, Field(min_length=1, max_length=1024)]


class PreferencesConfig(Section):
    """Training on pairs of a chosen and a rejected answer, or on rated answers (`train.objective`);
    an objective takes the settings that name it."""

    affects: ClassVar = Affects("result", stages=("preflight_run", "finetune", "evaluate_run"))

    reference: ScoredModel = START
    """Reference model of dpo, ipo and kto: `start` of the training, by one more forward of each
    step; or stored scores of `original`, a run's name, a folder (adapter or model), or a hub
    id."""
    beta: float | None = Field(None, gt=0.0, le=100.0)
    """Strength of the pull to the reference (ipo: tau; orpo: lambda; simpo: scale of the reward).
    null = 0.1, simpo 2."""
    loss_type: PairLoss = "sigmoid"
    """dpo: loss of a pair, with TRL's names."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """dpo (sigmoid, robust, exo_pair) and simpo: probability that the labels of a pair are
    swapped."""
    gamma: float = Field(0.5, ge=0.0, le=100.0)
    """simpo: margin between the rewards of chosen and rejected."""
    desirable_weight: float = Field(1.0, ge=0.0, le=1000.0)
    """kto: weight of desirable answers in the loss."""
    undesirable_weight: float = Field(1.0, ge=0.0, le=1000.0)
    """kto: weight of undesirable answers."""
    shared_prompt: bool = True
    """Compute a prompt once for all its answers in training, if the attention supports it."""
    sft_weight: float = Field(0.0, ge=0.0, le=1000.0)
    """dpo, ipo, simpo: weight of the supervised loss of chosen answers (per trained token), added
    to the loss of pairs."""

    @model_validator(mode="after")
    def _smoothing_has_a_loss(self) -> "PreferencesConfig":
        if self.label_smoothing > 0 and self.loss_type not in SMOOTHED:
            raise ValueError(
                f"label_smoothing = {self.label_smoothing}: loss_type = {self.loss_type} has none. "
                f"Set it to 0, or loss_type to one of {', '.join(SMOOTHED)}"
            )
        if self.label_smoothing == 0 and self.loss_type == "exo_pair":
            raise ValueError(
                "label_smoothing = 0.0: loss_type = exo_pair takes its logarithm. Set it above 0 "
                "(0.001 as published), or take another loss_type"
            )
        return self

    @model_validator(mode="after")
    def _some_answer_counts(self) -> "PreferencesConfig":
        if self.desirable_weight == self.undesirable_weight == 0:
            raise ValueError(
                "desirable_weight = 0 and undesirable_weight = 0: nothing would be trained. Set "
                "one above 0"
            )
        return self


class DistillConfig(Section):
    """Training on what a teacher says of the training data (`train.objective: distill`): the loss
    of a token is T^2 KL(teacher || student) + sft_weight (-log p)."""

    affects: ClassVar = Affects("result", stages=("preflight_run", "finetune", "evaluate_run"))

    teacher: ScoredModel = "original"
    """The teacher: `original` in 16 bits, a run's name, a folder (adapter or model), or a hub id.
    It needs the student's tokenizer."""
    top_k: int = Field(32, ge=1, le=4096)
    """Number of the teacher's likeliest tokens to store per position; all others count as one."""
    temperature: float = Field(1.0, ge=0.01, le=100.0)
    """Temperature: it divides the log-probabilities of these k + 1 outcomes for teacher and
    student."""
    sft_weight: float = Field(0.0, ge=0.0, le=1000.0)
    """Weight of the supervised loss beside the teacher's."""


class GrpoConfig(Section):
    """Training on the model's own answers by their advantages (`train.objective: grpo`). The ratio
    of a token is its probability, divided by the one at the start of the training."""

    affects: ClassVar = Affects("result", stages=("preflight_run", "finetune", "evaluate_run"))

    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    """The smallest ratio to the start's probability that counts is 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0.0, le=100.0)
    """The largest is 1 + clip_high (DAPO: 0.28)."""
    normalize: Normalization = "token"
    """Divisor of the loss: trained tokens (DAPO), each answer's own (GRPO), or a constant (Dr.
    GRPO)."""
    constant: int = Field(1024, ge=1)
    """Tokens by which `normalize: constant` divides an answer's sum."""
    importance_cap: float | None = Field(3.0, gt=0.0)
    """Largest weight of a token whose sampler has another probability; null = no weights."""
    kl: float = Field(0.0, ge=0.0, le=100.0)
    """Weight of KL to `kl_reference`."""
    kl_reference: ScoredModel = START
    """`start`, or a model as in `preferences.reference`."""

    @model_validator(mode="after")
    def _reference_is_read(self) -> "GrpoConfig":
        if self.kl == 0 and self.kl_reference != START:
            raise ValueError(
                f"kl_reference = {self.kl_reference}: with kl = 0.0 it has no effect. Raise kl, or "
                f"set it to {START}"
            )
        return self


class Needs(NamedTuple):
    """An objective's needs of data, scores and settings."""

    examples: Examples
    scores_of: Literal["preferences.reference", "distill.teacher", "grpo.kl_reference"] | None
    """The setting that names the model whose scores it reads."""
    settings: tuple[str, ...]
    """All settings of `preferences`, `distill` and `grpo` that it reads."""
    forward_first: bool = False
    """Its loss needs a number of the whole step, which one more forward of all micro-batches
    finds."""


def _preferences(*keys: str) -> tuple[str, ...]:
    return tuple(f"preferences.{key}" for key in (*keys, "shared_prompt"))


NEEDS: Mapping[ObjectiveName, Needs] = {
    "sft": Needs("texts", None, ()),
    "dpo": Needs(
        "pairs",
        "preferences.reference",
        _preferences("reference", "beta", "loss_type", "label_smoothing", "sft_weight"),
    ),
    "ipo": Needs("pairs", "preferences.reference", _preferences("reference", "beta", "sft_weight")),
    "simpo": Needs("pairs", None, _preferences("beta", "label_smoothing", "gamma", "sft_weight")),
    "orpo": Needs("pairs", None, _preferences("beta")),
    "kto": Needs(
        "rated",
        "preferences.reference",
        _preferences("reference", "beta", "desirable_weight", "undesirable_weight"),
        forward_first=True,
    ),
    "distill": Needs(
        "texts", "distill.teacher", tuple(f"distill.{key}" for key in DistillConfig.model_fields)
    ),
    "grpo": Needs(
        "groups",
        "grpo.kl_reference",
        ("preferences.shared_prompt", *(f"grpo.{key}" for key in GrpoConfig.model_fields)),
    ),
}


def needs_of(objective: ObjectiveName) -> Needs:
    """Return an objective's examples, the model whose scores it reads, and its settings."""
    return NEEDS[objective]


def reads_start(objective: ObjectiveName, preferences: PreferencesConfig) -> bool:
    """Return whether an objective compares the model with the start of the training, which the
    training module computes itself."""
    needs = needs_of(objective)
    needs_reference = needs.scores_of == "preferences.reference"
    return needs.examples == "groups" or (needs_reference and preferences.reference == START)


def readers_of(setting: str) -> list[ObjectiveName]:
    """Return the objectives that read a setting of `preferences`, `distill` or `grpo`."""
    return [name for name, needs in NEEDS.items() if setting in needs.settings]
