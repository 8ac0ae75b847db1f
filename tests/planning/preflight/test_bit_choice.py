"""`quantize.keep: auto`: the best set in the memory that is left, never at the price of speed."""

from itertools import pairwise

import pytest

from tests.support.decisions import AS_IT_WAS, decided, llama_8b, message, run_config
from tests.support.made_up_memory import MadeUpMemory
from tests.support.preflight_examples import cpu_machine, machine, token_counts
from workflow.lib.artifacts.records import Provenance, Sensitivities
from workflow.lib.model.architecture.kept_linears import kept_linears
from workflow.lib.planning.model_sizes import weights_by_path
from workflow.lib.planning.preflight.bit_choice import BitOrder, as_fast, costs_of
from workflow.lib.planning.preflight.decision import decide
from workflow.lib.planning.preflight.forecast import forecast
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.preflight.table import render
from workflow.lib.system.errors import UserError
from workflow.lib.system.units import GIB

PATHS = llama_8b.linear_paths()
# Values cost most, and deep layers more than early ones.
COSTS = {
    path: (10.0 if "v_proj" in path else 1.0) * (1 + number / 1e3) * 1e-3
    for number, path in enumerate(PATHS)
}


# One plan alone, so that memory decides.
FIXED = {"micro_batch_size": 2, "activation_checkpointing": False}


def auto(gib, *, processes=1, record=None, train=FIXED):
    run = run_config(quantize={"keep": "auto"}, hardware=AS_IT_WAS, train=train)
    on = machine(processes=processes, gpu_bytes=int(gib * GIB))
    record = record or MadeUpMemory(llama_8b)
    tokens = token_counts(seq_len=2048)
    planned = PlannedRun(run, llama_8b, on, tokens, record, costs=COSTS)
    decision = decide(planned)
    return decision, forecast(decision, planned)


def kept(decision):
    return kept_linears(decision.chosen.plan.kept, PATHS)


def test_most_loss_per_byte_is_won_back_first():
    decision, _ = auto(24)
    chosen = kept(decision)
    sizes = weights_by_path(llama_8b)
    gains = {path: COSTS[path] / sizes[path] for path in PATHS}
    assert 32 <= len(chosen) < len(PATHS)
    assert min(gains[x] for x in chosen) >= max(gains[x] for x in PATHS if x not in chosen)


def test_set_fills_the_memory_beside_the_same_plan():
    on = machine(processes=1, gpu_bytes=24 * GIB)
    nf4 = decided(on=on, hardware=AS_IT_WAS, train=FIXED).chosen
    decision, _ = auto(24)
    chosen = decision.chosen
    assert chosen.fits
    assert chosen.replayed
    options = ("micro_batch_size", "activation_checkpointing", "offload_activations")
    assert all(getattr(chosen.plan, x) == getattr(nf4.plan, x) for x in options)
    one_more = 2 * max(weights_by_path(llama_8b).values())
    assert decision.limits.capacity_bytes < decision.limits.needed_bytes(
        chosen.replayed.reserved_bytes + one_more
    )


def test_more_memory_keeps_more_from_the_same_costs_until_all():
    counts = [len(kept(auto(gib)[0])) for gib in (22, 26, 80)]
    assert counts[0] < counts[1] < counts[2] == len(PATHS)


def test_set_whose_recording_takes_more_than_the_line_gets_smaller():
    expected = auto(24)[0]
    nf4 = MadeUpMemory(llama_8b)
    decided(
        on=machine(processes=1, gpu_bytes=24 * GIB), record=nf4, hardware=AS_IT_WAS, train=FIXED
    )
    before = len(nf4.asked)
    larger = MadeUpMemory(llama_8b, share=lambda number: 1.0 if number < before else 1.04)
    decision, _ = auto(24, record=larger)
    assert decision.chosen.fits
    assert 0 < len(kept(decision)) < len(kept(expected))


def test_all_linears_with_other_memory_options_are_taken_where_they_are_as_fast():
    decision, document = auto(24, train={})
    nf4 = decided(on=machine(processes=1, gpu_bytes=24 * GIB), hardware=AS_IT_WAS).chosen
    assert len(kept(decision)) == len(PATHS)
    assert decision.chosen.micro_batch_size < nf4.micro_batch_size
    assert as_fast(decision.chosen, nf4)
    assert document.bits.kept == len(PATHS)
    assert document.bits.points[-1].verdict == "taken, with other memory options"


def test_slower_set_is_not_taken_and_told():
    """Two 4090 gather 16 bits over PCIe, four times the bytes of NF4, though memory is left."""
    decision, document = auto(80, processes=2, train={"micro_batch_size": 1})
    assert 0 < len(kept(decision)) < len(PATHS)
    assert document.bits.points[-1].verdict.endswith("% slower")
    assert "quantize.method = none" in document.bits.slower
    assert document.bits.slower in " ".join(render(document, run="r").split())


def test_curve_shows_memory_share_and_nats():
    _, document = auto(24)
    points = document.bits.points
    assert [x.share for x in points] == sorted(x.share for x in points)
    assert points[0].nats == pytest.approx(sum(COSTS.values()))
    for less, more in pairwise(points):
        assert less.nats > more.nats
        assert less.peak_bytes < more.peak_bytes
    (taken,) = [x for x in points if x.verdict == "taken"]
    text = render(document, run="r")
    assert f"{document.bits.kept} of {len(PATHS)} linears in 16 bits" in text
    assert f"{100 * taken.share:.1f}" in text
    assert "GiB too much" in text


def test_cpu_has_no_memory_to_fill():
    said = message(on=cpu_machine(processes=1), quantize={"keep": "auto"})
    assert "quantize.keep = 'auto'" in said
    assert "run has none (hardware.gpus). Name linears" in said


def test_prediction_without_sensitivities_says_where_they_come_from():
    said = message(quantize={"keep": "auto"})
    assert "quantize.keep = 'auto'" in said
    assert "snakemake preflight" in said


def test_costs_are_half_those_of_own_text_and_half_those_of_other_kinds():
    provenance = Provenance(
        stage="x", commit=None, packages={}, platform="", cpu_count=1, created_utc=""
    )
    nats = {"training": {"a": 1.0}, "text": {"a": 3.0}, "prose": {"a": 6.0, "b": 2.0}}
    record = Sensitivities(
        tokens={}, nats=nats, model_files={}, device="cpu", provenance=provenance
    )
    assert costs_of(record) == {"a": (2.0 + 6.0) / 2, "b": 1.0}


def test_costs_of_another_model_are_refused():
    with pytest.raises(UserError, match=r"model\.layers\.99\.up.*belong to another model"):
        BitOrder.of({"model.layers.99.up": 1.0}, llama_8b)
