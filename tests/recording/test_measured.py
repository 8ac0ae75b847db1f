"""The memory that recordings predict, beside what GPUs have measured."""

import pytest

from tests.support.measurements import all_lines, counts, measured_lines, row

COUNTED = [line for line in all_lines() if counts(line)]
LINES = {(line["case"], line["versions"]["commit"]): line for line in COUNTED}
# One of each kind: `python -m tests.support.measurements` looks at all.
KINDS = (
    ("olmo2", "0d0e7fd"),
    ("graphs_kept", "fe03f01"),
    ("graphs_1b", "fe03f01"),
    ("8b_kept", "3a56d7c"),
    ("8b_grad_op", "3a56d7c"),
    ("70b_rows_4", "3a56d7c"),
    ("llama2-70b-2x24gb", "5541524"),
    ("moe_shard_grad_op", "5d4797b"),
    ("moe_float8_no_recomputation", "5d4797b"),
    ("h100_8b_float8_no_recomputation", "7ba77b7"),
    ("moe_no_recomputation", "a348f07"),
    ("moe_float8_no_recomputation", "a348f07"),
)
LARGEST_ALLOCATED_ERROR, LARGEST_RESERVED_ERROR = 0.001, 0.015


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
def test_recorded_memory_is_what_was_measured(process, kind):
    found = row(LINES[kind], process)
    assert abs(found.allocated_error) < LARGEST_ALLOCATED_ERROR
    assert abs(found.reserved_error) < LARGEST_RESERVED_ERROR


FUSED_LOSS = {
    line["case"]: line
    for line in measured_lines("recorded/families-and-loss_1xh200_2026-11-26.jsonl")
    if (line["setup"] or {}).get("fused_loss")
}


@pytest.mark.parametrize(("case", "error"), [("smollm3_fused", 0.001), ("gemma3_fused", 0.004)])
def test_recorded_memory_with_a_loss_by_kernels_is_what_was_measured(process, case, error):
    found = row(FUSED_LOSS[case], process)
    assert found.plan.fused_loss
    assert abs(found.allocated_error) < error
    assert abs(found.reserved_error) < LARGEST_RESERVED_ERROR
