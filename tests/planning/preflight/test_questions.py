"""The longest row and the largest model, on memory that is made up."""

from dataclasses import replace
from typing import get_args

import pytest

from tests.support.decisions import llama_8b, run_config
from tests.support.made_up_memory import MadeUpMemory
from tests.support.preflight_examples import (
    llama_70b,
    llama_405b,
    llama_shape,
    machine,
    token_counts,
)
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.preflight.questions import largest, longest, predicted
from workflow.lib.settings.objectives import ObjectiveName
from workflow.lib.system.units import GIB

few_layers = llama_shape(
    layers=4, hidden=4096, feed_forward=14336, heads=32, kv_heads=8, vocab=32000
)


def asked(shape=few_layers, share=1.0, run=None, **changes):
    on = machine(**{"gpu_bytes": 10 * GIB} | changes)
    record = MadeUpMemory(shape, lambda _: share)
    return PlannedRun(run or run_config(), shape, on, token_counts(seq_len=2048), record)


def fits(one, seq_len):
    return predicted(one.with_rows_of(seq_len))[0].fits


@pytest.mark.parametrize("share", [1.0, 1.15, 0.9])
def test_longest_row_fits_and_one_that_is_2_percent_longer_does_not(share):
    """Also where recordings take more, or less, than the lines between them say."""
    one = asked(share=share)
    found = longest(one)
    assert fits(one, found.plan.seq_len)
    assert not fits(one, int(found.plan.seq_len * 1.02) + 64)


@pytest.mark.parametrize(("context", "seq_len"), [(4100, 4096), (40, 40)])
def test_longest_row_is_the_context_of_the_model_where_memory_allows_it(context, seq_len):
    """In steps of 64 tokens, where it has as many."""
    found = longest(asked(replace(few_layers, max_position_embeddings=context)))
    assert found.plan.seq_len == seq_len


def test_no_row_is_the_longest_where_the_model_does_not_fit():
    assert longest(asked(gpu_bytes=1 * GIB)) is None


def test_longest_row_is_found_by_lines_alone_where_an_estimate_is_asked_for():
    one = replace(asked(), estimate=True)
    found = longest(one)
    assert found.method == "lines"
    assert one.record.asked == []


def test_less_host_memory_makes_the_longest_row_shorter():
    rows = [longest(asked(host_bytes=gib * GIB)) for gib in (6, 64)]
    assert rows[0].plan.seq_len < rows[1].plan.seq_len


def test_largest_model_is_the_largest_that_fits_and_larger_ones_say_why_they_do_not():
    shapes = {
        "8b": llama_8b,
        "70b": llama_70b(),
        "405b": llama_405b(),
        "short": replace(llama_70b(layers=84), max_position_embeddings=1024),
    }
    on = {"gpu_bytes": 24 * GIB, "host_bytes": 32 * GIB}
    found = largest(shapes, lambda name: asked(shapes[name], **on))
    assert found.name == "70b"
    assert found.forecast.verdict == "fits"
    assert "GiB of packed weights" in found.larger["405b"]
    assert "GiB and has 32.00" in found.larger["405b"]
    assert "max_position_embeddings is 1024" in found.larger["short"]


def test_none_is_the_largest_where_none_fits():
    found = largest(
        {"8b": llama_8b}, lambda _: asked(llama_8b, gpu_bytes=2 * GIB, host_bytes=4 * GIB)
    )
    assert (found.name, found.forecast) == (None, None)
    assert list(found.larger) == ["8b"]


@pytest.mark.parametrize("objective", get_args(ObjectiveName))
def test_questions_are_answered_for_every_objective(objective):
    run = run_config(train={"objective": objective, "global_batch_size": 2})
    found = longest(replace(asked(run=run), estimate=True))
    assert found.plan.objective == objective
