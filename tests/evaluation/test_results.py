"""What 4 bits cost, from the record of a base."""

from typing import Any

import pytest

from workflow.lib.artifacts.records import CalibrationFacts, HeldoutLosses
from workflow.lib.evaluation.results import four_bits_of, method_of, summarize
from workflow.lib.system.files import provenance, write_checked_json

TOKENS = [10, 30, 20, 40, 5, 15]
ORIGINAL = [20.0, 63.0, 38.0, 79.0, 10.0, 30.0]


def facts(documents=6):
    tokens, original = TOKENS[:documents], ORIGINAL[:documents]
    return CalibrationFacts(
        tokens=512,
        heldout=HeldoutLosses(
            tokens=tokens,
            original=original,
            absmax=[loss + 0.3 * n for loss, n in zip(original, tokens, strict=True)],
            calibrated=[loss + 0.1 * n for loss, n in zip(original, tokens, strict=True)],
        ),
    )


def test_differences_are_per_token_and_paired():
    bits = summarize(facts())
    assert bits.original == pytest.approx(240.0 / 120)
    assert bits.absmax.loss_difference == pytest.approx(0.3)
    assert bits.calibrated.loss_difference == pytest.approx(0.1)
    assert bits.won_back.loss_difference == pytest.approx(0.2)
    # Every document loses the same per token: nothing varies.
    assert bits.won_back.loss_difference_ci95 == pytest.approx((0.2, 0.2))
    assert bits.documents == 6


def record(**changes):
    sizes = {"quantized_linears": 8, "quantized_parameters": 64, "total_bytes": 32}
    settings: dict[str, Any] = {"settings": {}, "device": "cpu", "provenance": provenance()}
    return sizes | settings | changes


CALIBRATED = {"method": "calibrated", "method_reason": "it is small"}


@pytest.mark.parametrize(
    ("changes", "method", "cost"),
    [
        (None, None, None),  # a base that was made elsewhere
        ({"method": "absmax"}, "absmax", None),
        ({"method": "absmax", "kept": 2}, "absmax, 2 of 10 in 16 bits", None),
        ({"method": "none", "quantized_linears": 0, "kept": 10}, "none", None),
        (CALIBRATED | {"calibration": facts(0).as_json()}, "calibrated (it is small)", None),
        (
            CALIBRATED | {"calibration": facts().model_dump()},
            "calibrated (it is small)",
            summarize(facts()),
        ),
    ],
)
def test_method_and_cost_are_read_from_the_base(tmp_path, changes, method, cost):
    if changes is not None:
        write_checked_json(tmp_path / "quantization.json", record(**changes))
    assert (method_of(tmp_path), four_bits_of(tmp_path)) == (method, cost)
