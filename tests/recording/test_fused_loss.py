"""Recordings of a loss that kernels compute: its logits are the head's matmul alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.preflight_examples import llama_config, setup
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.memory.replay import replay

# The loss decides on the peak.
WIDE = llama_config(256, 512, 1, 2, 1, 32_768)
CAPPED = WIDE | {"model_type": "gemma3_text", "head_dim": 128, "final_logit_softcapping": 30.0}
LOGITS = 1024 * 32_768  # of a chunk


@pytest.mark.parametrize(
    ("config", "levers", "spared"),
    [
        (WIDE, {"processes": 1}, 10),
        (WIDE, {"processes": 2}, 3),
        (CAPPED, {"processes": 1}, 14),
        (WIDE, {"processes": 1, "trains_head": True}, 12),
    ],
    ids=["one process", "two processes", "capped", "trained head"],
)
def test_kernels_spare_the_logits_in_fp32(process, config, levers, spared):
    """spared: bytes a logit of a chunk, of which each of two processes has a half."""
    shape = describe_config(config, origin=Path("model"))
    stored = setup(seq_len=2048, fused_layers=True, targets=shape.linear_names, **levers)
    fused = replace(stored, fused_loss=True)

    def recorded(chosen):
        return replay(process.record(config, chosen, checked=False))

    found = {chosen.fused_loss: recorded(chosen) for chosen in (stored, fused)}
    less = found[False].peaks.allocated_bytes - found[True].peaks.allocated_bytes
    assert found[False].peaks.peak_phase == "loss"
    assert less / LOGITS == pytest.approx(spared, abs=0.3)
