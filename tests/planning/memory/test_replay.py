"""The replay of a tape: peaks, phases, terms, and a limit."""

import pytest

from workflow.lib.planning.memory.allocation_tape import CHECKS, HOST, LOAD, Tape
from workflow.lib.planning.memory.replay import replay

MIB = 2**20
PAGE = 20 * MIB  # of large blocks


def training():
    """Weights; a check; a step whose forward keeps something for backward."""
    tape = Tape()
    tape.phase(LOAD)
    tape.new(40 * MIB, "nf4_weights")
    tape.phase(CHECKS)
    tape.free(tape.new(90 * MIB, "logits"))
    tape.phase("forward")
    kept = tape.new(30 * MIB, "saved_activations")
    tape.free(tape.new(20 * MIB, "layer_workspace"))
    tape.phase("backward")
    gradient = tape.new(50 * MIB, "layer_workspace")
    tape.free(kept)
    tape.free(gradient)
    return tape


def test_peaks_of_phases_and_the_terms_at_the_largest_are_counted():
    tape = training()
    tape.phase("optimizer_step")
    tape.new(100 * MIB, "adam_moments")
    found = replay(tape)
    assert found.peaks.phase_bytes == {
        "load": 40 * MIB, "check": 130 * MIB, "forward": 90 * MIB, "backward": 120 * MIB,
        "optimizer_step": 140 * MIB,
    }  # fmt: skip
    assert (found.peaks.allocated_bytes, found.peaks.peak_phase) == (140 * MIB, "optimizer_step")
    assert found.peaks.terms == {"nf4_weights": 40 * MIB, "adam_moments": 100 * MIB}
    assert found.reserved_bytes >= found.peaks.allocated_bytes
    assert found.lacking_bytes == 0


def test_other_stream_cannot_use_what_one_has_left():
    tape = Tape()
    tape.phase("forward")
    tape.free(tape.new(PAGE, "layer_workspace"))
    tape.free(tape.new(PAGE, "gather_buffer", "beside"))
    assert (replay(tape).peaks.allocated_bytes, replay(tape).reserved_bytes) == (PAGE, 2 * PAGE)


def test_limit_below_what_is_reserved_is_served_by_giving_back_free_pages():
    tape = training()
    tape.free(tape.new(PAGE, "gather_buffer", "beside"))
    free = replay(tape)
    tight = replay(tape, limit_bytes=free.reserved_bytes - PAGE)
    assert (tight.lacking_bytes, tight.peaks.allocated_bytes) == (0, free.peaks.allocated_bytes)
    assert tight.reserved_bytes <= free.reserved_bytes - PAGE


def test_capture_takes_pages_of_its_own_after_free_ones_went_back():
    """A first micro-batch of 30 MiB (2 pages) goes back; the captured one takes 2 pages, which the
    update afterwards cannot use: it needs 2 more."""
    tape = Tape()
    tape.phase("forward")
    tape.free(tape.new(30 * MIB, "layer_workspace"))
    tape.empty_cache()
    tape.free(tape.new(30 * MIB, "layer_workspace", "graphs"))
    assert replay(tape).reserved_bytes == 2 * PAGE
    tape.phase("optimizer_step")
    tape.free(tape.new(30 * MIB, "layer_workspace"))
    found = replay(tape)
    assert (found.reserved_bytes, found.peaks.allocated_bytes) == (4 * PAGE, 30 * MIB)
    assert set(found.peaks.phases) == {"load", "forward", "optimizer_step"}


@pytest.mark.parametrize("missing", [MIB, 30 * MIB])
def test_limit_below_what_is_allocated_is_lacking(missing):
    limit = replay(training()).peaks.allocated_bytes - missing
    assert replay(training(), limit_bytes=limit).lacking_bytes >= missing


def test_host_memory_is_counted_beside_the_gpu_in_powers_of_two():
    tape = training()
    before = replay(tape)
    first = tape.new(3 * MIB, "offloaded_activations", HOST)
    tape.free(first)
    tape.new(2 * MIB, "offloaded_activations", HOST)
    found = replay(tape)
    assert found.peaks.host_bytes == 4 * MIB
    assert (found.reserved_bytes, found.peaks.phases) == (
        before.reserved_bytes,
        before.peaks.phases,
    )
