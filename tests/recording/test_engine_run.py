"""What the engine asks of a GPU's allocator, recorded on fake tensors, beside the trace that was
written by hand from it and held against GPUs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.preflight_examples import setup
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.offload_terms import offload_window
from workflow.lib.planning.memory.replay import Replay, replay_tape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.trace_step import step_trace
from workflow.lib.recording.engine_run import Request
from workflow.lib.recording.recording_process import RecordingProcess, recording_process

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
ALONE = {"processes": 1}
KEPT = {"activation_checkpointing": False}
FEW = {"targets": ("q_proj", "v_proj")}


@pytest.fixture(scope="module")
def process() -> Iterator[RecordingProcess]:
    with recording_process() as started:
        yield started


def chosen(**levers: Any) -> Setup:
    return setup(**({"fused_layers": True, "micro_batch_size": 1} | levers))


def recorded(process: RecordingProcess, config: dict[str, Any], levers: Setup) -> Tape:
    shape = describe_config(config, origin=Path("model"))
    window = offload_window(shape, levers)
    return process.record(Request(config, levers, window, checked=False))


def traced(config: dict[str, Any], levers: Setup) -> Replay:
    shape = describe_config(config, origin=Path("model"))
    return replay_tape(step_trace(shape, levers, checked=False))


@pytest.mark.parametrize(
    "levers",
    [
        {},
        ALONE,
        ALONE | KEPT,
        ALONE | {"activation_checkpointing": 2},
        ALONE | {"fused_layers": False},
        ALONE | {"attention": "sdpa"},
        ALONE | {"attention": "eager"},
        ALONE | {"double_quant": False},
        ALONE | {"dora": True},
        ALONE | {"dropout": True},
        ALONE | {"offload_layers": 2},
        ALONE | {"trains_head": True, "trains_embedding": True, "accumulates": True},
        ALONE | {"optimizer": "adamw_8bit"},
        ALONE | FEW,
        {"processes": 3, "activation_checkpointing": 2},
        {"processes": 4, "replicas": 2},
        {"processes": 16},
        {"offload_activations": True},
        {"reshard_after_forward": False},
        {"accumulates": True, "offload_embedding": True},
        {"offload_layers": 1},
        {"trains_head": True, "trains_embedding": True},
    ],
    ids=str,
)
def test_engine_asks_for_what_the_trace_says(
    process: RecordingProcess, levers: dict[str, Any]
) -> None:
    """The peaks while the loss and gradients are made; and no more in forward, where the trace
    lets go of a gate too late. The gradient of a trained table is added up in backward, which the
    trace counts to the loss.
    """
    asked = chosen(**levers)
    engine, by_hand = replay_tape(recorded(process, LLAMA, asked)), traced(LLAMA, asked)
    for phase in ("loss",) if asked.trained_tables else ("loss", "backward"):
        assert engine.phases[phase] == pytest.approx(by_hand.phases[phase], rel=1e-3), phase
    assert 0.94 <= engine.phases["forward"] / by_hand.phases["forward"] <= 1.001


@pytest.mark.parametrize("products", ["float8", "int8"])
@pytest.mark.parametrize("tokens", [{}, {"seq_len": 8192}], ids=["short", "long"])
@pytest.mark.parametrize("levers", [ALONE, {"processes": 3}], ids=["alone", "sharded"])
def test_engine_asks_no_more_than_the_trace_in_8_bits(
    process: RecordingProcess, levers: dict[str, Any], tokens: dict[str, Any], products: str
) -> None:
    """The trace counts an upper bound of what is rounded beside a weight, whose rows may be wider
    than those that are there at the peak.
    """
    asked = chosen(**(levers | tokens | {"products": products}))
    engine, by_hand = replay_tape(recorded(process, LLAMA, asked)), traced(LLAMA, asked)
    for phase, least in {"forward": 0.85, "backward": 0.95}.items():
        assert least <= engine.phases[phase] / by_hand.phases[phase] <= 1.001, phase


def test_recording_is_the_same_each_time(process: RecordingProcess) -> None:
    """Down to the order of events: nothing in it is left to how threads take turns."""
    asked = chosen(processes=3, activation_checkpointing=2)
    first, second = (recorded(process, LLAMA, asked) for _ in range(2))
    assert [*first.events] == [*second.events]
    assert [*first.sizes] == [*second.sizes]
