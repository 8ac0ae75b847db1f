"""How a base was quantized, and what 4 bits cost: the losses that its calibration has measured."""

from collections.abc import Sequence
from pathlib import Path

from workflow.lib.artifacts.evaluation_record import (
    FourBits,
    LossDifference,
    WorstLinear,
    WorstStack,
)
from workflow.lib.artifacts.quantization_record import CalibrationFacts, Quantization
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.evaluation.bootstrap import estimate_ratio
from workflow.lib.model.safetensors_reader import QUANTIZATION

WORST = 5  # linears, and stacks of experts, that the report lists
RESAMPLES, SEED = 2000, 0


def four_bits_of(base: Path) -> FourBits | None:
    """Return what the base's calibration measured on held-out documents, or None."""
    if not (base / QUANTIZATION).is_file():
        return None
    calibration = read_record(base / QUANTIZATION, Quantization).calibration
    if calibration is None or not calibration.heldout.tokens:
        return None
    return summarize(calibration)


def method_of(base: Path) -> str | None:
    """Return how a base was quantized, and why if there was a choice; None if it is not told."""
    if not (base / QUANTIZATION).is_file():
        return None
    record = read_record(base / QUANTIZATION, Quantization)
    reason = record.method_reason
    return record.method if reason is None else f"{record.method} ({reason})"


def summarize(calibration: CalibrationFacts) -> FourBits:
    """Return the measured losses as means and paired differences over documents."""
    losses = calibration.heldout
    worst = sorted(calibration.linears.items(), key=lambda item: -item[1].calibrated)[:WORST]
    stacks = sorted(calibration.stacks.items(), key=lambda item: -item[1].median.calibrated)[:WORST]
    return FourBits(
        documents=len(losses.tokens),
        original=sum(losses.original) / sum(losses.tokens),
        absmax=_difference(losses.absmax, losses.original, losses.tokens),
        calibrated=_difference(losses.calibrated, losses.original, losses.tokens),
        won_back=_difference(losses.absmax, losses.calibrated, losses.tokens),
        worst=[WorstLinear(path=path, **errors.model_dump()) for path, errors in worst],
        worst_stacks=[WorstStack(path=path, **errors.model_dump()) for path, errors in stacks],
    )


def _difference(
    first: Sequence[float], second: Sequence[float], tokens: Sequence[int]
) -> LossDifference:
    """Return first - second per token, with its interval if there are two documents."""
    differences = [one - other for one, other in zip(first, second, strict=True)]
    if len(tokens) < 2:
        mean = sum(differences) / sum(tokens)
        return LossDifference(
            loss_difference=mean, loss_difference_ci95=None, p_value=None, documents=len(tokens)
        )
    estimate = estimate_ratio(differences, tokens, resamples=RESAMPLES, seed=SEED)
    return LossDifference(
        loss_difference=estimate.value,
        loss_difference_ci95=estimate.ci95,
        p_value=estimate.p_value,
        documents=len(tokens),
    )
