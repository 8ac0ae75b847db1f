"""What 4 bits cost, from the record of a base."""

from typing import Any

import pytest

from workflow.lib.artifacts.quantization_record import (
    CalibrationFacts,
    HeldoutLosses,
    LinearErrors,
    StackErrors,
)
from workflow.lib.evaluation.results import WORST, four_bits_of, method_of, summarize
from workflow.lib.system.files import provenance, write_checked_json

TOKENS = [10, 30, 20, 40]
ORIGINAL = [20.0, 63.0, 38.0, 79.0]


def stack_errors(number):
    median, worst = (
        LinearErrors(absmax=0.04, calibrated=x, absmax_plain=0.01, calibrated_plain=0.012)
        for x in (0.002 * number, 0.0375)
    )
    return StackErrors(
        median=median, worst=worst, worst_expert=73, fewest_tokens=1409, filled=number
    )


def facts(documents=4, *, stacks=0):
    tokens, original = TOKENS[:documents], ORIGINAL[:documents]
    return CalibrationFacts(
        tokens=512,
        linears={
            f"layers.{n}.mlp.up_proj": LinearErrors(
                absmax=0.02, calibrated=0.001 * n, absmax_plain=0.01, calibrated_plain=0.012
            )
            for n in range(8)
        },
        stacks={f"layers.{n}.mlp.experts.down_proj": stack_errors(n) for n in range(stacks)},
        heldout=HeldoutLosses(
            tokens=tokens,
            original=original,
            absmax=[loss + 0.3 * n for loss, n in zip(original, tokens, strict=True)],
            calibrated=[loss + 0.1 * n for loss, n in zip(original, tokens, strict=True)],
        ),
    )


def test_differences_are_per_token_and_paired():
    bits = summarize(facts())
    assert bits.original == pytest.approx(200.0 / 100)
    assert bits.absmax.loss_difference == pytest.approx(0.3)
    assert bits.calibrated.loss_difference == pytest.approx(0.1)
    assert bits.won_back.loss_difference == pytest.approx(0.2)
    # Every document loses the same per token: nothing varies.
    assert bits.won_back.loss_difference_ci95 == pytest.approx((0.2, 0.2))
    assert bits.documents == 4


def test_linears_that_lose_most_come_first():
    worst = summarize(facts()).worst
    assert [linear.path for linear in worst] == [f"layers.{n}.mlp.up_proj" for n in (7, 6, 5, 4, 3)]
    assert len(worst) == WORST


def test_stacks_whose_median_expert_loses_most_come_first():
    assert summarize(facts()).worst_stacks == []
    worst = summarize(facts(stacks=7)).worst_stacks
    assert [x.path for x in worst] == [f"layers.{n}.mlp.experts.down_proj" for n in (6, 5, 4, 3, 2)]
    assert worst[0].median.calibrated == 0.012


def record(**changes):
    sizes = {"quantized_linears": 8, "quantized_parameters": 64, "total_bytes": 32}
    settings: dict[str, Any] = {"settings": {}, "device": "cpu", "provenance": provenance()}
    return sizes | settings | changes


def test_base_that_was_not_calibrated_has_no_cost(tmp_path):
    assert four_bits_of(tmp_path) is None, "a base that was made elsewhere"
    write_checked_json(tmp_path / "quantization.json", record())
    assert four_bits_of(tmp_path) is None
    write_checked_json(
        tmp_path / "quantization.json", record(calibration=facts(documents=0).as_json())
    )
    assert four_bits_of(tmp_path) is None, "no held-out documents"


def test_method_is_read_from_the_base_with_its_reason(tmp_path):
    assert method_of(tmp_path) is None, "a base that was made elsewhere"
    for changes, told in (
        ({}, None),  # of an earlier version
        ({"method": "absmax"}, "absmax"),
        ({"method": "calibrated", "method_reason": "it is small"}, "calibrated (it is small)"),
    ):
        write_checked_json(tmp_path / "quantization.json", record(**changes))
        assert method_of(tmp_path) == told


def test_cost_is_read_from_the_base(tmp_path):
    write_checked_json(tmp_path / "quantization.json", record(calibration=facts().model_dump()))
    assert four_bits_of(tmp_path) == summarize(facts())
