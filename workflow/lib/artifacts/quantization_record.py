"""`quantization.json` of a base folder, written by `quantize_base`."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from workflow.lib.artifacts.records import Provenance, Record


class LinearErrors(Record):
    """How far a linear in 4 bits is off, by method: as a share of the squared norm."""

    absmax: float
    """Of its outputs for the calibration inputs, in bitsandbytes' codes and scales."""
    calibrated: float
    """The same in the calibrated ones, which the base has."""
    absmax_plain: float
    """Of its weights, in bitsandbytes' codes and scales."""
    calibrated_plain: float
    """The same in the calibrated ones."""


class StackErrors(Record):
    """How far the experts of a stack in 4 bits are off."""

    median: LinearErrors
    """Of the expert in the middle, by how far its calibrated weight is off."""
    worst: LinearErrors
    """Of the expert that is furthest off."""
    worst_expert: int
    """Its number."""
    fewest_tokens: int
    """Tokens of calibration that went to the expert with the fewest."""
    filled: int
    """Experts with tokens for less than a quarter of their inputs; others' were added."""


class HeldoutLosses(Record):
    """Loss on held-out documents (some, and cut where they are long) of three models."""

    tokens: list[int]
    """Predicted tokens of each document."""
    original: list[float]
    """Nats, summed over each document, of the model before quantization."""
    absmax: list[float]
    """Of the model in bitsandbytes' codes and scales."""
    calibrated: list[float]
    """Of the base."""


class CalibrationFacts(Record):
    """What a calibration saw and reached."""

    tokens: int
    """Tokens that calibrated."""
    linears: dict[str, LinearErrors]
    """Errors by path."""
    stacks: dict[str, StackErrors] = Field(default_factory=dict)
    """Errors of the stacks of experts, by path."""
    heldout: HeldoutLosses
    """What 4 bits cost."""


class Quantization(Record):
    """`quantization.json`."""

    advice: ClassVar[str] = "Delete the base's folder below results/base; it is made again."

    quantized_linears: int
    """Linears in NF4."""
    quantized_stacks: int = 0
    """Stacks of experts in NF4: one for each projection of all experts of a layer."""
    quantized_parameters: int
    """Weights of both."""
    total_bytes: int
    """Bytes of all weights, the others included."""
    settings: dict[str, Any]
    """Section `quantize`."""
    method: Literal["absmax", "calibrated"] | None = None
    """How codes and scales were chosen; null in bases of earlier versions."""
    method_reason: str | None = None
    """Why, with `quantize.method: auto`, or of a base that is in NF4 already."""
    device: str
    """`cuda` or `cpu`."""
    auto_class: str = "AutoModelForCausalLM"
    """Transformers' class that loads this base and its original."""
    in_16_bits: list[str] = Field(default_factory=list)
    """Linears that are not in NF4, or ends of their paths: none if it is the head alone."""
    taken: bool = False
    """Whether the original is in NF4 itself, and its bytes are these."""
    only_here: str | None = "how they were made is not recorded"
    """Why Transformers, given the original, makes other 4-bit weights; null: it makes these."""
    calibration: CalibrationFacts | None = None
    """If it was calibrated."""
    provenance: Provenance
    """What made the file."""
