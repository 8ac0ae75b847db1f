"""Micro-batches of models with recurrent layers are recorded as they are captured: nothing in them
waits for the device."""

import pytest

from tests.support.families import RECURRENT
from tests.support.other_decoders import config_of
from tests.support.preflight_examples import setup
from workflow.lib.planning.memory.allocation_tape import EMPTY_CACHE


@pytest.mark.parametrize("documents_per_row", [1.0, 5.0])
@pytest.mark.parametrize("family", [*RECURRENT, "lfm2_moe"])
def test_captured_micro_batch_of_recurrent_layers_is_recorded(process, family, documents_per_row):
    levers = setup(
        seq_len=128,
        micro_batch_size=2,
        processes=1,
        targets=("q_proj",),
        cuda_graphs=True,
        documents_per_row=documents_per_row,
    )
    assert levers.graphed
    tape = process.record(config_of(family), levers, checked=False, whole=True)
    assert tape.events.count(EMPTY_CACHE) == 1
    captured = tape.events[tape.events.index(EMPTY_CACHE) :]
    assert "forward" in captured


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_layers_before_the_first_adapter_are_recorded_with_several_processes(process, family):
    """FSDP2 gathers their weights for a backward that they do not have."""
    levers = setup(seq_len=64, processes=2, targets=("q_proj",), fused_layers=True)
    assert process.record(config_of(family), levers, checked=False).events
