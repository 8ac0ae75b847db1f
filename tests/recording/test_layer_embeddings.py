"""Recordings of a model whose layers have embeddings of their own and share keys and values: all of
its layers are recorded."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.support.preflight_examples import llama_config, setup
from workflow.lib.checkpoints.meta_model import build_config_on_meta
from workflow.lib.model.architecture.layer_choice import LayerChoice
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.memory.replay import replay
from workflow.lib.recording.repeat_layers import layer_kinds

# Gemma 4 E2B with fewer layers, half of which share keys, and fewer tokens.
CONFIG = llama_config(1536, 6144, 6, 8, 1, 32768, head_dim=256) | {
    "model_type": "gemma4_text",
    "global_head_dim": 512,
    "vocab_size_per_layer_input": 32768,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
}
TABLES = 2 * 32768 * (1536 + 6 * 256)
SCALARS = 2048  # bytes, rounded up: what the embeddings are multiplied by


@pytest.mark.parametrize(
    "levers", [{"processes": 1}, {}, {"cuda_graphs": True, "accumulation_steps": 2}], ids=str
)
def test_embeddings_of_layers_are_cut_over_processes(process, levers):
    shape = describe_config(CONFIG, origin=Path("model"))
    asked = setup(targets=shape.linear_names, fused_layers=True, **levers)
    tape = process.record(CONFIG, asked, checked=False)
    found = replay(tape)
    tables = found.peaks.terms["embedding_and_head"]
    assert tables == pytest.approx(TABLES // asked.processes, abs=SCALARS)


@pytest.mark.parametrize(
    ("shared", "width", "themselves"),
    [(12, 256, True), (12, 0, True), (0, 256, True), (0, 0, False)],
)
def test_layers_that_take_something_of_others_stand_for_themselves(shared, width, themselves):
    changes = {
        "num_hidden_layers": 24,
        "layer_types": CONFIG["layer_types"] * 4,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": width,
    }
    config = AutoConfig.for_model(**CONFIG | changes)
    model = build_config_on_meta(config, dtype=torch.bfloat16)
    every = LayerChoice(range(24), (), (), ())
    kinds = len({*layer_kinds(model, every)})
    assert kinds == 24 if themselves else kinds <= 4  # 2 or 4, by the release of Transformers
