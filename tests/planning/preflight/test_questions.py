"""The longest row and the largest model, on memory that is made up."""

import math
import re
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
    found = longest(one).forecast
    assert fits(one, found.plan.seq_len)
    assert not fits(one, int(found.plan.seq_len * 1.02) + 64)


@pytest.mark.parametrize(("context", "seq_len"), [(4100, 4096), (40, 40)])
def test_longest_row_is_the_context_of_the_model_where_memory_allows_it(context, seq_len):
    """In steps of 64 tokens, where it has as many."""
    found = longest(asked(replace(few_layers, max_position_embeddings=context))).forecast
    assert found.plan.seq_len == seq_len


@pytest.mark.parametrize("estimate", [True, False], ids=["estimate", "recorded"])
@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ({"gpu_bytes": 1 * GIB}, r"of 1\.00 GiB of each GPU"),
        ({"host_bytes": 2 * GIB}, r"GiB of host memory together, 2\.00 GiB may be used"),
        ({"disk_free_bytes": 2**20}, r"of disk, 1\.0+ MiB are free"),
    ],
    ids=["GPU", "host", "disk"],
)
def test_row_that_does_not_fit_names_what_it_lacks(lacking, words, estimate):
    disk = {key: lacking[key] for key in lacking if key == "disk_free_bytes"}
    on = {key: lacking[key] for key in lacking if key not in disk}
    answer = longest(replace(asked(**on), estimate=estimate, **disk))
    assert answer.forecast is None
    assert re.search(words, answer.shortage)


@pytest.mark.parametrize("estimate", [True, False], ids=["estimate", "recorded"])
@pytest.mark.parametrize(
    ("host_gib", "words"), [(5.5, "of host memory together"), (64, "of each GPU")]
)
def test_longest_row_names_what_bounds_it(host_gib, words, estimate):
    one = replace(asked(host_bytes=int(host_gib * GIB)), estimate=estimate)
    assert words in longest(one).shortage
    short = replace(few_layers, max_position_embeddings=4096)
    assert longest(replace(one, shape=short)).shortage is None


@pytest.mark.parametrize("estimate", [True, False], ids=["estimate", "recorded"])
def test_longest_row_is_shared_by_as_many_processes_as_it_needs(estimate):
    rows = []
    for wanted in (1, 2, "auto"):
        run = run_config(hardware={"context_parallel": wanted, "offload_activations": False})
        one = replace(asked(run=run, gpu_bytes=6 * GIB), estimate=estimate)
        plan = longest(one).forecast.plan
        rows.append((plan.seq_len, plan.context_parallel))
    assert rows[0][0] < rows[1][0]
    assert rows[1][1] == 2
    assert rows[2] == rows[1]
    short = replace(few_layers, max_position_embeddings=4096)
    assert longest(replace(one, shape=short)).forecast.plan.context_parallel == 1


class Concave(MadeUpMemory):
    """Host memory as the root of the length: lines between two lengths say too little."""

    def peaks(self, plans):
        roots = [int(8 * GIB * math.sqrt(plan.seq_len / 2**17)) for plan in plans]
        pairs = zip(super().peaks(plans), roots, strict=True)
        return [replace(peaks, host_bytes=size) for peaks, size in pairs]


def test_estimate_is_shorter_where_recordings_of_the_length_refuse_what_lines_allow():
    one = asked(gpu_bytes=80 * GIB, host_bytes=16 * GIB)
    one = replace(one, estimate=True, record=Concave(few_layers))
    answer = longest(one)
    assert fits(one, answer.forecast.plan.seq_len)
    assert "of host memory together" in answer.shortage


def test_longest_row_is_found_by_lines_alone_where_an_estimate_is_asked_for():
    one = replace(asked(), estimate=True)
    found = longest(one).forecast
    assert found.method == "lines"
    assert one.record.asked == []


def test_less_host_memory_makes_the_longest_row_shorter():
    rows = [longest(asked(host_bytes=gib * GIB)).forecast for gib in (6, 64)]
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
    found = longest(replace(asked(run=run), estimate=True)).forecast
    assert found.plan.objective == objective
