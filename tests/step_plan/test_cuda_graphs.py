"""What CUDA graphs take, and where there are none."""

import pytest

from tests.support.preflight_examples import llama_shape, setup
from workflow.lib.planning.timing.step_time import gpu_parts
from workflow.lib.planning.timing.step_work import micro_batch_work
from workflow.lib.system.gpu_models import parse_gpu

TINY = llama_shape(layers=3, hidden=30, feed_forward=46, heads=3, kv_heads=1, vocab=101)
ALONE = {"processes": 1, "attention": "varlen"}


def graphed(**changes):
    return setup(**(ALONE | {"cuda_graphs": True} | changes))


@pytest.mark.parametrize(
    ("levers", "words"),
    [
        ({"processes": 16, "nodes": 2}, "machines exchange"),
        ({"offload_layers": 1}, "weights come from"),
        ({"trains_head": True}, "trained whole"),
        ({"dora": True}, "DoRA"),
        ({"attention": "sdpa"}, "model.attention = sdpa"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_known_to_keep_graphs_off_is_named(levers, words):
    refused = graphed(**levers)
    assert words in str(refused.graph_obstacle)
    assert not refused.graphed
    assert graphed().graph_obstacle is None


@pytest.mark.parametrize(
    "levers",
    [
        {"processes": 2},
        {"offload_embedding": True},
        {"offload_activations": True},
        {"attention": "flex"},
    ],
    ids=str,
)
def test_several_gpus_of_a_machine_have_graphs_and_so_has_what_comes_from_host_memory(levers):
    assert graphed(**levers).graphed


def test_graphs_do_not_wait_for_python():
    gpu = parse_gpu("H200", setting="hardware.gpu_model")
    waits = {
        flag: gpu_parts(micro_batch_work(TINY, graphed(cuda_graphs=flag), trained_share=1.0), gpu)[
            "waiting_for_python"
        ]
        for flag in (False, True)
    }
    assert waits[False] > 0 == waits[True]
