"""`quantization.json` of a base folder, written by `quantize_base`."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from workflow.lib.artifacts.records import Provenance, Record


class LinearErrors(Record):
    """How far a linear in 4 bits is off, by method: as a share of the squared norm."""

    absmax: float  # of its outputs for the calibration inputs, in bitsandbytes' codes and scales
    calibrated: float  # the same in the calibrated ones, which the base has
    absmax_plain: float  # of its weights, in bitsandbytes' codes and scales
    calibrated_plain: float  # the same in the calibrated ones


class StackErrors(Record):
    """How far the experts of a stack in 4 bits are off."""

    median: LinearErrors  # of the expert in the middle, by how far its calibrated weight is off
    worst: LinearErrors  # of the expert that is furthest off
    worst_expert: int  # its number
    fewest_tokens: int  # tokens of calibration that went to the expert with the fewest
    filled: int  # experts with tokens for less than a quarter of their inputs; others' were added


class HeldoutLosses(Record):
    """Loss on held-out documents (some, and cut where they are long) of three models."""

    tokens: list[int]  # predicted tokens of each document
    original: list[float]  # Nats, summed over each document, of the model before quantization
    absmax: list[float]  # of the model in bitsandbytes' codes and scales
    calibrated: list[float]  # of the base


class CalibrationFacts(Record):
    """What a calibration saw and reached."""

    tokens: int  # tokens that calibrated
    linears: dict[str, LinearErrors]  # errors by path
    stacks: dict[str, StackErrors] = Field(default_factory=dict)
    """Errors of the stacks of experts, by path."""
    heldout: HeldoutLosses  # what 4 bits cost


class Quantization(Record):
    """`quantization.json`."""

    advice: ClassVar[str] = "Delete the base's folder below results/base; it is made again."

    quantized_linears: int  # linears in NF4
    quantized_stacks: int = 0
    """Stacks of experts in NF4: one for each projection of all experts of a layer."""
    quantized_parameters: int  # weights of both
    total_bytes: int  # bytes of all weights, the others included
    settings: dict[str, Any]  # section `quantize`
    method: Literal["absmax", "calibrated"] | None = None
    """How codes and scales were chosen; null in bases of earlier versions."""
    method_reason: str | None = None
    """Why, with `quantize.method: auto`, or of a base that is in NF4 already."""
    device: str  # `cuda` or `cpu`
    auto_class: str = "AutoModelForCausalLM"
    """Transformers' class that loads this base and its original."""
    in_16_bits: list[str] = Field(default_factory=list)
    """Linears that are not in NF4, or ends of their paths: none if it is the head alone."""
    taken: bool = False  # whether the original is in NF4 itself, and its bytes are these
    only_here: str | None = "how they were made is not recorded"
    """Why Transformers, given the original, makes other 4-bit weights; null: it makes these."""
    calibration: CalibrationFacts | None = None  # if it was calibrated
    provenance: Provenance  # what made the file
