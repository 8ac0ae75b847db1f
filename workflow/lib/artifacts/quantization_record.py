"""`quantization.json` of a base folder, written by `quantize_base`."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from workflow.lib.artifacts.records import Provenance, Record


class HeldoutLosses(Record):
    """Loss on held-out documents (some, and cut where they are long) of three models."""

    tokens: list[int]  # predicted tokens of each document
    original: list[float]  # Nats, summed over each document, of the model before quantization
    absmax: list[float]  # of the model in bitsandbytes' codes and scales
    calibrated: list[float]  # of the base


class CalibrationFacts(Record):
    """What a calibration saw and reached."""

    tokens: int  # tokens that calibrated
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
