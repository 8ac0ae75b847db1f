"""LongRoPE is recorded, though Transformers makes its long factors of numbers in Python at the
first call; and so is attention that drops weights, by whatever implementation."""

import pytest

from tests.support.families import RECURRENT
from tests.support.other_decoders import config_of
from tests.support.preflight_examples import setup
from workflow.lib.model.architecture.shipped_shapes import known_config
from workflow.lib.planning.memory.allocation_tape import EMPTY_CACHE

LIMIT = 128


@pytest.mark.parametrize("seq_len", [LIMIT // 2, 2 * LIMIT])
def test_model_with_longrope_is_recorded(process, seq_len):
    config = config_of("phi3")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": LIMIT,
        "short_factor": [1.0] * (head_dim // 2),
        "long_factor": [4.0 + n for n in range(head_dim // 2)],
    }
    config |= {"rope_parameters": rope, "max_position_embeddings": 4 * LIMIT}
    levers = setup(seq_len=seq_len, micro_batch_size=2, processes=1, targets=("o_proj",))
    tape = process.record(config, levers, checked=False, whole=True)
    assert "forward" in tape.events


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
def test_model_whose_family_drops_attention_weights_is_recorded(process, attention):
    config = config_of("seed_oss") | {"attention_dropout": 0.1}
    levers = setup(
        seq_len=64, micro_batch_size=2, processes=1, targets=("o_proj",),
        attention=attention, attention_dropout=True,
    )  # fmt: skip
    tape = process.record(config, levers, checked=False, whole=True)
    assert "forward" in tape.events


def test_soft_caps_of_flash_attention_are_recorded(process):
    """Its kernels allocate what varlen's do, which have no such caps."""
    levers = setup(
        seq_len=64, micro_batch_size=2, processes=1, targets=("o_proj",),
        attention="flash_attention_2",
    )  # fmt: skip
    tape = process.record(config_of("gemma2"), levers, checked=False)
    assert "forward" in tape.events


def test_wide_adapters_of_wide_experts_have_grids_that_gpus_take(process):
    """Mixtral's B at rank 256: 7.3 million rows by expert."""
    mixtral = known_config("mistralai/Mixtral-8x7B-v0.1")
    assert mixtral is not None
    targets = ("gate_up_proj", "down_proj")
    levers = setup(seq_len=64, micro_batch_size=1, processes=1, rank=256, targets=targets)
    tape = process.record(mixtral | {"num_hidden_layers": 1}, levers, checked=False, whole=True)
    assert "backward" in tape.events


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
