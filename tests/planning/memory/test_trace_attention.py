"""The allocations of flex attention against those of an H200 (torch 2.11.0+cu130), and against what
grows with S x S."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.support.preflight_examples import setup
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.architecture.shipped_shapes import known_shape
from workflow.lib.planning.memory.allocation_tape import SavedOnDevice, Tape
from workflow.lib.planning.memory.closed_form import predict
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.memory.terms import mask_bytes
from workflow.lib.planning.memory.trace_attention import AttentionTrace


def gemma() -> ModelShape:
    shape = known_shape("gemma-2-27b")
    assert shape is not None
    return shape


SHAPE = gemma()
CHOSEN = setup(processes=1, micro_batch_size=2, seq_len=3072, attention="flex")


def live_bytes(tape: Tape, events: Sequence[int | str]) -> tuple[int, int]:
    """Return what is there more after these events than before, and at most between."""
    now = most = 0
    for event in events:
        assert isinstance(event, int)
        now += tape.sizes[event] if event >= 0 else -tape.sizes[~event]
        most = max(most, now)
    return now, most


def during(tape: Tape, call: Callable[[], object]) -> tuple[int, int]:
    first = len(tape.events)
    call()
    return live_bytes(tape, tape.events[first:])


def test_kernel_keeps_and_takes_what_it_did_on_a_gpu() -> None:
    """32 heads of queries and 16 of keys, 128 wide, 2 rows of 3,072 tokens, soft-capped."""
    tape = Tape()
    trace = AttentionTrace(tape, SHAPE.kinds[0], CHOSEN, tokens=2 * 3072)
    query, key, values = (tape.new(2 * 6144 * heads * 128, "work") for heads in (32, 16, 16))
    found: list[object] = []
    saved = SavedOnDevice(tape)
    assert during(tape, lambda: found.extend(trace._kernel(query, key, values, saved))) == (
        51_118_080,
        51_904_512,
    )
    output, backward = found
    assert isinstance(output, int)
    assert callable(backward)
    tape.hold(output)  # as its user does
    grad = tape.hold(tape.new(tape.sizes[output], "work"))
    assert during(tape, lambda: backward(grad)) == (99_876_864, 101_449_728)


def test_soft_capped_model_takes_no_more_than_a_plain_one_but_its_masks() -> None:
    """And a small part of what eager attention takes."""
    flex, flash, eager = (
        replay(SHAPE, replace(CHOSEN, attention=kind)).allocated_bytes
        for kind in ("flex", "flash", "eager")
    )
    assert flex <= flash + mask_bytes(SHAPE, CHOSEN)
    assert flex < 0.9 * eager
    assert flex <= predict(SHAPE, CHOSEN).peak_bytes <= 1.02 * flex


def test_masks_are_those_of_a_gpu() -> None:
    """Tables of 19,200 bytes for two rows, and the first keys twice; for each of Gemma's kinds."""
    assert mask_bytes(SHAPE, CHOSEN) == 2 * (19_200 + 2 * 2 * 4 * 3072)
