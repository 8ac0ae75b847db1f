"""Trained routers and their load-balancing loss, as a recording of the engine finds them."""

import pytest

from tests.support.preflight_examples import llama_config, setup
from workflow.lib.planning.memory.replay import replay

EXPERTS, HIDDEN, LAYERS = 64, 1024, 12
MIXTURE = llama_config(HIDDEN, 2048, LAYERS, 16, 4, 8000, head_dim=64) | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
}
ROUTER = 4 * EXPERTS * HIDDEN


def chosen(**levers):
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    return setup(**({"fused_layers": True, "processes": 1, "targets": targets} | levers))


TRAINED = {"routers": ("mlp.gate",)}
BALANCED = {"balances_routers": True}


@pytest.fixture(scope="module")
def recorded(process):
    """Record a set-up, for all tests that ask for it."""
    kept = {}

    def tape(levers):
        key = repr(levers)
        if key not in kept:
            kept[key] = process.record(MIXTURE, levers, checked=False)
        return kept[key]

    return tape


def term(tape, name):
    pairs = zip(tape.terms, tape.sizes, strict=True)
    return sum(size for found, size in pairs if found == name)


@pytest.mark.parametrize("processes", [1, 4])
def test_masters_and_moments_of_routers_are_cut_over_processes(recorded, processes):
    frozen, trained = (chosen(processes=processes, **x) for x in ({}, TRAINED))
    tapes = [recorded(levers) for levers in (frozen, trained)]
    for name, copies in (("lora_weights", 1), ("adam_moments", 2)):
        expected = copies * LAYERS * ROUTER // processes
        found = term(tapes[1], name) - term(tapes[0], name)
        assert found == pytest.approx(expected, abs=4 * LAYERS)  # each moment counts its steps


@pytest.mark.parametrize("every", [True, False])
def test_balance_keeps_a_layers_logits_at_most(recorded, every):
    plain, balanced = (
        replay(recorded(chosen(activation_checkpointing=every, **TRAINED, **levers)))
        for levers in ({}, BALANCED)
    )
    more = balanced.peaks.allocated_bytes - plain.peaks.allocated_bytes
    logits = 2 * 2048 * EXPERTS
    layers = 1 if every else LAYERS
    assert layers * logits * (not every) <= more <= (layers + 12) * logits
