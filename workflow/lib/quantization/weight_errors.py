"""How far a weight in 4 bits is off: its outputs for the calibration inputs, and itself."""

import torch

from workflow.lib.artifacts.quantization_record import LinearErrors


def weight_errors(
    weight: torch.Tensor, absmax: torch.Tensor, calibrated: torch.Tensor, correlation: torch.Tensor
) -> LinearErrors:
    return LinearErrors(
        absmax=weighted_error(weight, absmax, correlation),
        calibrated=weighted_error(weight, calibrated, correlation),
        absmax_plain=plain_error(weight, absmax),
        calibrated_plain=plain_error(weight, calibrated),
    )


def weighted_error(
    weight: torch.Tensor, approximation: torch.Tensor, correlation: torch.Tensor
) -> float:
    """Return the share of the output's squared norm that is wrong: tr(D H D^T) / tr(W H W^T)."""
    difference = weight - approximation
    lost = (difference @ correlation * difference).sum(dtype=torch.float64)
    whole = (weight @ correlation * weight).sum(dtype=torch.float64)
    return float(lost / whole) if whole else 0.0


def plain_error(weight: torch.Tensor, approximation: torch.Tensor) -> float:
    """Return the share of the weight's squared norm that is wrong."""
    lost = (weight - approximation).square().sum(dtype=torch.float64)
    return float(lost / weight.square().sum(dtype=torch.float64).clamp_min(1e-30))
