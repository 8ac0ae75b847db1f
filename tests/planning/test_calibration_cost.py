"""Which bases `quantize.method: auto` calibrates."""

import math

import pytest

from workflow.lib.planning.model_sizes import chosen_method, rounding_seconds


def test_columns_and_weights_of_linears_and_experts_are_counted():
    columns = 5 + 11 + 8 * 64
    weights = 7 * 5 + 3 * 11 + 8 * 96 * 64
    expected = columns * 10e-6 + weights * 7e-9
    assert rounding_seconds([(7, 5), (3, 11), (8, 96, 64)]) == pytest.approx(expected)


def layer(hidden, intermediate, heads, key_value_heads):
    """A dense layer of a Llama, with heads of 128."""
    q, kv = 128 * heads, 128 * key_value_heads
    attention = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]
    return [*attention, *[(intermediate, hidden)] * 2, (hidden, intermediate)]


def mixture(layer, experts):
    *attention, (width, hidden), _, down = layer
    return [*attention, (experts, 2 * width, hidden), (experts, *down)]


LLAMA_8B, LLAMA_70B = layer(4096, 14336, 32, 8), layer(8192, 28672, 64, 8)
QWEN_30B, GPT_OSS = mixture(layer(2048, 768, 32, 4), 128), mixture(layer(2880, 2880, 32, 4), 32)


@pytest.mark.parametrize(
    ("shapes", "measured_s"),
    [(LLAMA_8B, 2.07), (LLAMA_70B, 7.88), (QWEN_30B, 7.92), (GPT_OSS, 6.63)],
    ids=["Llama 3 8B", "Llama 3 70B", "Qwen3-30B-A3B", "gpt-oss-20b"],
)
def test_time_of_a_layer_is_within_a_fifth_of_what_was_measured(shapes, measured_s):
    """One H200, 24,576 tokens of calibration, 2026-11-25; two constants are fitted to these."""
    assert rounding_seconds(shapes) == pytest.approx(measured_s, rel=0.2)


@pytest.mark.parametrize(
    ("shapes", "method", "minutes"),
    [
        (32 * LLAMA_8B, "calibrated", "1.02"),
        (80 * LLAMA_70B, "calibrated", "9.02"),
        (48 * QWEN_30B, "calibrated", "6.45"),
        (126 * layer(16384, 53248, 128, 8), "calibrated", "50"),
        (60 * mixture(layer(7168, 2048, 128, 128), 384), "absmax", "157"),
    ],
    ids=["Llama 3 8B", "Llama 3 70B", "Qwen3-30B-A3B", "Llama 3 405B", "1T in 384 experts"],
)
def test_auto_calibrates_what_one_gpu_does_in_an_hour(shapes, method, minutes):
    chosen, reason = chosen_method("auto", shapes)
    assert chosen == method
    assert f"takes about {minutes} minutes on one H200" in reason
    assert f"{sum(map(math.prod, shapes)):,} weights" in reason


@pytest.mark.parametrize("method", ["absmax", "calibrated"])
def test_method_that_is_named_is_taken_whatever_it_costs(method):
    assert chosen_method(method, [(10**6, 10**6, 10**6)]) == (method, None)
