"""Predicted seconds of a step beside what was measured on one H200 of mixtures, and of products in
float8, which constants were not fitted to.
"""

import json
from statistics import median

import pytest

from tests.support.measurements import described, measured_lines
from workflow.lib.benchmark.cases import model_config
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.timing.step_time import gpu_seconds, micro_batch_work
from workflow.lib.settings.benchmark import BenchmarkConfig
from workflow.lib.system.gpu_models import BY_NAME

LINES = {line["case"]: line for line in measured_lines("recorded/families_1xh200_2026-11-24.jsonl")}


@pytest.mark.parametrize(
    ("case", "largest_error"),
    [
        ("mixtral", 0.06),
        ("moe_kept", 0.16),  # Python's share depends on the host
        ("wide_float8", 0.01),
        ("wide_float8_kept", 0.04),
        ("wide_float8_offloaded", 0.01),
    ],
)
def test_step_takes_what_was_predicted(case: str, largest_error: float) -> None:
    line = LINES[case]
    setup = Setup(**line["setup"] | {"targets": tuple(line["setup"]["targets"])})
    sizes = BenchmarkConfig(**line["sizes"])
    shape = described(json.dumps(model_config(sizes)), sizes.model)
    predicted = gpu_seconds(
        micro_batch_work(shape, setup, trained_share=1.0), BY_NAME["NVIDIA H200"]
    )
    steps = line["measured"]["step_s"]
    measured = median(steps[len(steps) // 3 :])
    assert abs(predicted / measured - 1) < largest_error
