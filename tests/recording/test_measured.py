"""The memory that recordings predict, beside what was measured on an H200 of models and products
that nothing was fitted to.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.measurements import described, measured_lines
from workflow.lib.benchmark.cases import model_config
from workflow.lib.planning.memory.offload_terms import offload_window
from workflow.lib.planning.memory.replay import replay_tape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.recording.engine_run import Request
from workflow.lib.recording.recording_process import RecordingProcess, recording_process
from workflow.lib.settings.benchmark import BenchmarkConfig

LINES = {line["case"]: line for line in measured_lines("recorded/families_1xh200_2026-11-24.jsonl")}
# One of each kind: `python -m tests.recording.test_measured` prints all.
KINDS = ("moe_kept", "moe", "oss_kept", "mixtral", "gemma2_kept", "olmo2", "wide_float8_offloaded")
LARGEST_ALLOCATED_ERROR, LARGEST_RESERVED_ERROR = 0.001, 0.015


@pytest.fixture(scope="module")
def process() -> Iterator[RecordingProcess]:
    with recording_process() as found:
        yield found


def errors(process: RecordingProcess, line: dict[str, Any]) -> tuple[float, float]:
    """Return by what share the replay is above what was allocated, and reserved."""
    setup = Setup(**line["setup"] | {"targets": tuple(line["setup"]["targets"])})
    sizes = BenchmarkConfig(**line["sizes"])
    config = model_config(sizes)
    window = offload_window(described(json.dumps(config), sizes.model), setup)
    replayed = replay_tape(
        process.record(Request(config, setup, window, checked=sizes.check_bytes))
    )
    measured = line["measured"]
    return (
        replayed.allocated_bytes / measured["allocated_bytes"] - 1,
        replayed.reserved_bytes / measured["reserved_bytes"] - 1,
    )


@pytest.mark.parametrize("case", KINDS)
def test_recorded_memory_is_what_was_measured(process: RecordingProcess, case: str) -> None:
    allocated, reserved = errors(process, LINES[case])
    assert abs(allocated) < LARGEST_ALLOCATED_ERROR
    assert abs(reserved) < LARGEST_RESERVED_ERROR


if __name__ == "__main__":
    with recording_process() as of_all:
        for name, found in LINES.items():
            print(name, *(f"{error:+.3%}" for error in errors(of_all, found)))
