"""Which bases `quantize.method: auto` calibrates."""

import pytest

from workflow.lib.planning.calibration_cost import chosen_method, num_columns


def test_columns_of_linears_and_experts_are_counted() -> None:
    assert num_columns([(7, 5), (3, 11), (8, 96, 64)]) == 5 + 11 + 8 * 64


def layer(hidden: int, intermediate: int) -> list[tuple[int, ...]]:
    """A dense layer of a Llama, of which only the inputs count."""
    return [*[(1, hidden)] * 6, (1, intermediate)]


def mixture(hidden: int, intermediate: int, experts: int) -> list[tuple[int, ...]]:
    return [*[(1, hidden)] * 4, (experts, 1, hidden), (experts, 1, intermediate)]


@pytest.mark.parametrize(
    ("shapes", "method", "minutes"),
    [
        (32 * layer(4096, 14336), "calibrated", "5.19"),
        (80 * layer(8192, 28672), "calibrated", "25.9"),
        (48 * mixture(2048, 768, 128), "absmax", "73.7"),
    ],
    ids=["Llama 3 8B", "Llama 3 70B", "Qwen3-30B-A3B"],
)
def test_auto_calibrates_what_one_gpu_rounds_in_an_hour(
    shapes: list[tuple[int, ...]], method: str, minutes: str
) -> None:
    chosen, reason = chosen_method("auto", columns=num_columns(shapes))
    assert chosen == method
    assert reason is not None
    assert f"takes about {minutes} minutes on one H200" in reason


@pytest.mark.parametrize("method", ["absmax", "calibrated"])
def test_method_that_is_named_is_taken_whatever_it_costs(method: str) -> None:
    assert chosen_method(method, columns=10**12) == (method, None)  # type: ignore[arg-type]
