"""Where there are no CUDA graphs."""

import pytest

from tests.support.preflight_examples import setup

ALONE = {"processes": 1, "attention": "varlen"}


def graphed(**changes):
    return setup(**(ALONE | {"cuda_graphs": True} | changes))


@pytest.mark.parametrize(
    ("levers", "words"),
    [
        ({"processes": 16, "nodes": 2}, "machines exchange"),
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
        {"offload_layers": 1},
        {"dora": True},
        {"trains_head": True, "trains_embedding": True},
        {"attention": "flex"},
        {"objective": "distill", "top_k": 8},
        {"objective": "dpo", "start_reference": True, "shares_prompts": True},
    ],
    ids=str,
)
def test_several_gpus_of_a_machine_have_graphs_and_so_have_objectives_and_host_memory(levers):
    assert graphed(**levers).graphed
