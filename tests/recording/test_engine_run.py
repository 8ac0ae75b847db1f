"""What the engine asks of a GPU's allocator, recorded on fake tensors, option by option: what it
counts as, and what is left at the end."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.support.preflight_examples import llama_config, setup
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.memory.allocation_tape import COMPUTE, EMPTY_CACHE, HOST
from workflow.lib.planning.memory.peaks import EXPLANATIONS
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.model_sizes import layer_bytes, offload_window, packed_bytes
from workflow.lib.planning.work import DECODE
from workflow.lib.recording.term_names import MAKERS

LLAMA = llama_config(8192, 28672, 12, 64, 8, 32000)
ALONE = {"processes": 1}
UNFUSED = {"fused_layers": False}
KEPT = {"activation_checkpointing": False}
GRAPHS = {"cuda_graphs": True}
OFFLOADED = {"offload_activations": True}
WITH_TABLES = {"trains_head": True, "trains_embedding": True}
PAIRS = {"objective": "dpo", "documents_per_row": 2.0}
GRAPHED_PAIRS = PAIRS | GRAPHS | {"start_reference": True, "shares_prompts": True}
KTO = {"objective": "kto", "documents_per_row": 2.0}
DISTILLED = {"objective": "distill", "top_k": 8}
SOME_OF_THREE = {"processes": 3, "activation_checkpointing": 2}
SHARED_ROWS = {"processes": 2, "context_parallel": 2}
FEW_NUMBERS = 64  # bytes: a scalar, the keys of a micro-batch's rows
# And of matmuls in 8 bits the scales of the weights' rows, made in the first forward.
STAY = {
    "nf4_weights",
    "nf4_scales",
    "nf4_tables",
    "embedding_and_head",
    "norms_and_biases",
    "lora_weights",
    "module_weights",
    "adam_moments",
    "cublas_workspace",
    "inputs",
}


def chosen(**levers):
    return setup(**({"fused_layers": True, "micro_batch_size": 2} | levers))


@cache
def shape():
    return describe_config(LLAMA, origin=Path("model"))


class Tapes:
    """Recordings of the process, each kept for all tests that ask for it."""

    def __init__(self, process):
        self._process = process
        self._kept = {}

    def made(self, levers):
        window = offload_window(shape(), levers)
        asked = replace(levers, offload_window_bytes=window)
        return self._process.record(LLAMA, asked, checked=False)

    def of(self, levers):
        key = repr(levers)
        if key not in self._kept:
            self._kept[key] = self.made(levers)
        return self._kept[key]


@pytest.fixture(scope="module")
def tapes(process):
    return Tapes(process)


@pytest.mark.parametrize(
    "levers",
    [
        {},
        WITH_TABLES,
        OFFLOADED | {"reshard_after_forward": False},
        UNFUSED | {"activation_checkpointing": 3, "attention": "sdpa", "trains_head": True},
        UNFUSED | {"accumulation_steps": 2, "offload_embedding": True, "double_quant": False},
        ALONE | {"attention": "sdpa", "optimizer": "adamw_8bit", "offload_layers": 2},
        ALONE | {"attention": "eager", "dora": True, "dropout": 0.05},
        GRAPHS | OFFLOADED,
        KEPT | GRAPHS | {"offload_activations": 4},
        SOME_OF_THREE,
        SHARED_ROWS,
        SHARED_ROWS | KEPT | {"processes": 3, "context_parallel": 3, "attention": "flex"},
        {"processes": 4, "replicas": 2, "accumulation_steps": 2, "offload_embedding": True},
        {"activation_checkpointing": 8, "offload_activations": 4},
        {"matmul_dtype": "float8"},
        KEPT | GRAPHS | {"matmul_dtype": "float8", "keep_decoded": 5},
        {"matmul_dtype": "float8", "kept": ("down_proj", r"layers\.[13]")},
        PAIRS | {"start_reference": True, "accumulation_steps": 2},
        GRAPHED_PAIRS,
        GRAPHS | KTO,
        KTO | {"micro_batch_size": 1},
        GRAPHS | {"objective": "grpo", "start_reference": True},
        GRAPHS | DISTILLED,
    ],
    ids=str,
)
def test_every_tensor_is_released_but_those_that_stay(tapes, levers):
    """And each has a term that is explained."""
    asked = chosen(**levers)
    tape = tapes.of(asked)
    found = replay(tape)
    assert (
        found.peaks.allocated_bytes == max(found.peaks.phase_bytes.values()) <= found.reserved_bytes
    )
    assert set(tape.terms) <= set(EXPLANATIONS)
    stay = STAY | ({"saved_activations"} if asked.matmul_dtype == "float8" else set())
    stay |= {"lora_gradients"} if asked.graphed else set()
    stay |= {"decoded_weights"} if asked.keep_decoded else set()
    there = [x for x in left(tape) if tape.streams[x] != HOST and tape.sizes[x] > FEW_NUMBERS]
    assert {tape.terms[x] for x in there} <= stay


@pytest.mark.parametrize("kept", [(), ("down_proj", r"layers\.\d*[02468]"), (".+",)], ids=str)
def test_frozen_weights_take_the_bytes_of_their_storage(tapes, kept):
    """The allocator rounds each tensor up."""
    plan = chosen(**ALONE, kept=kept)
    terms = replay(tapes.of(plan)).peaks.terms
    stored = sum(layer_bytes(shape(), plan))
    assert stored <= terms["nf4_weights"] + terms.get("nf4_scales", 0) <= 1.0005 * stored


BOTH_PASSES = {"matmul_dtype": "float8"}
DECODED_BYTES = [
    ({}, 2),
    (BOTH_PASSES, 2),
    (BOTH_PASSES | {"matmul_passes": "backward"}, 3),
    (BOTH_PASSES | {"kept": (".+",)}, 2),
    ({"kept": (".+",)}, 0),
]


@pytest.mark.parametrize(("levers", "num_bytes"), DECODED_BYTES, ids=str)
def test_decoded_weights_take_their_bytes_and_are_decoded_no_more(tapes, levers, num_bytes):
    """Scales add little; the first layer's queries, keys and values have no gradient of x."""
    plan = chosen(**ALONE | KEPT | GRAPHS | levers)
    once, always = (tapes.of(replace(plan, keep_decoded=count)) for count in (12, 0))
    weights = 12 * sum(linear.num_weights for linear in shape().layer(0).linears)
    peaks = [replay(tape).peaks for tape in (once, always)]
    decoded = peaks[0].terms.get("decoded_weights", 0)
    assert 0.99 * num_bytes * weights <= decoded <= 1.001 * num_bytes * weights
    work_of_decoding = [phase.get(DECODE) for phase in once.work.phases.values()]
    assert not any(work_of_decoding)
    more = peaks[0].allocated_bytes - peaks[1].allocated_bytes
    assert 0.97 * num_bytes * weights <= more <= 1.001 * num_bytes * weights


def test_what_is_offloaded_is_page_locked_memory_of_the_host(tapes):
    """The input of each layer and what is saved behind them; packed weights of layers."""
    inputs = replay(tapes.of(chosen(**ALONE | OFFLOADED))).peaks.host_bytes
    row = 2 * 4096 * LLAMA["hidden_size"]  # bf16, 2 rows of 2,048 tokens
    assert 12 * row <= inputs <= 15 * row
    layers = replay(tapes.of(chosen(**ALONE | {"offload_layers": 2}))).peaks.host_bytes
    packed = packed_bytes(shape().layer(0).linears, chosen())
    assert layers == 2 * 2 ** math.ceil(math.log2(packed))
    assert replay(tapes.of(chosen(**ALONE))).peaks.host_bytes == 0


def test_reference_of_the_start_takes_a_forward_before_the_step(tapes):
    """Of all micro-batches, whose layers gather weights and make adapters' casts as in training."""
    scored, started = (tapes.of(chosen(**PAIRS, start_reference=x)) for x in (False, True))
    terms = [
        {tape.terms[x] for x in tape.events[: tape.events.index("look_up_embedding")] if made(x)}
        for tape in (scored, started)
    ]
    assert "dequantized_weight" in terms[1] - terms[0]


def test_forward_of_a_reference_runs_beside_the_memory_of_a_graph(tapes):
    """In the steps after the capture, whose pool stays."""
    tape = tapes.of(chosen(**GRAPHED_PAIRS))
    later = tape.events[tape.events.index(EMPTY_CACHE) :]
    decoded = {tape.streams[x] for x in later if made(x) and tape.terms[x] == "dequantized_weight"}
    assert len(decoded) == 2
    assert COMPUTE in decoded


@pytest.mark.parametrize(
    ("levers", "token_bytes"),
    [
        (DISTILLED, 8 * 8 + 9 * 4),  # 8 ids and 9 log-probabilities of the teacher
        (PAIRS, 4),  # a log-probability of the reference
        # keys with a quarter more, a token's own one and its copy
        (PAIRS | {"shares_prompts": True}, 4 + 8 * (1.25 + 1 + 1)),
    ],
    ids=str,
)
def test_inputs_of_a_graph_are_those_of_its_objective_with_padding(tapes, levers, token_bytes):
    plain, found = (
        sum(tape.sizes[x] for x in left(tape) if tape.streams[x] != HOST)
        for tape in (tapes.of(chosen(**ALONE | GRAPHS | x)) for x in ({}, levers))
    )
    assert found - plain == pytest.approx(4096 * token_bytes, abs=200)  # examples and documents


def made(event):
    return isinstance(event, int) and event >= 0


def left(tape):
    """Return the tensors that are there at the end; each is made once, and released once."""
    there = set()
    for event in tape.events:
        if isinstance(event, int):
            assert (event >= 0) != (~event in there)
            there ^= {event if event >= 0 else ~event}
    return there


def test_tensors_are_named_by_the_code_that_makes_them(tapes):
    """With each of them in one of three recordings."""
    recorded = (WITH_TABLES, GRAPHS | OFFLOADED, ALONE | KEPT | GRAPHS | {"keep_decoded": 12})
    assert {*MAKERS.values()} <= {term for x in recorded for term in tapes.of(chosen(**x)).terms}


@pytest.mark.parametrize("accumulates", [False, True])
def test_captured_micro_batch_takes_memory_of_its_own(tapes, accumulates):
    """It is the second one; its activations are all in a pool of their own, and none is left."""
    asked = chosen(**ALONE | KEPT | GRAPHS, accumulation_steps=2 if accumulates else 1)
    tape = tapes.of(asked)
    begin = tape.events.index(EMPTY_CACHE)
    assert tape.events.count(EMPTY_CACHE) == 1
    assert tape.events[:begin].count("forward") == tape.events[begin:].count("forward") == 1
    streams = {"before": set(), "after": set()}
    for index, event in enumerate(tape.events):
        if isinstance(event, int) and event >= 0 and tape.terms[event] == "saved_activations":
            streams["before" if index < begin else "after"].add(tape.streams[event])
    assert streams == {"before": {COMPUTE}, "after": {"beside_0"}}
    assert not {tape.terms[x] for x in left(tape)} & {"saved_activations", "adapter_casts"}


def test_recording_is_the_same_each_time(tapes):
    """Down to the order of events: nothing in it is left to how threads take turns."""
    asked = chosen(**SOME_OF_THREE)
    first, second = tapes.of(asked), tapes.made(asked)
    assert [*first.events] == [*second.events]
    assert [*first.sizes] == [*second.sizes]


# The loss decides on the peak.
WIDE = llama_config(256, 512, 1, 2, 1, 32_768)
CAPPED = WIDE | {"model_type": "gemma3_text", "head_dim": 128, "final_logit_softcapping": 30.0}
LOGITS = 1024 * 32_768  # of a chunk


@pytest.mark.parametrize(
    ("config", "levers", "spared"),
    [
        (WIDE, {"processes": 1}, 10),
        (WIDE, {"processes": 2}, 3),
        (CAPPED, {"processes": 1}, 14),
        (WIDE, {"processes": 1, "trains_head": True}, 10),  # a chunk has all 2,048 rows
    ],
    ids=["one process", "two processes", "capped", "trained head"],
)
def test_kernels_spare_the_logits_in_fp32(process, config, levers, spared):
    """spared: bytes a logit of a chunk, of which each of two processes has a half."""
    shape = describe_config(config, origin=Path("model"))
    stored = setup(seq_len=2048, fused_layers=True, targets=shape.linear_names, **levers)
    fused = replace(stored, fused_loss=True)

    def recorded(chosen):
        return replay(process.record(config, chosen, checked=False))

    found = {chosen.fused_loss: recorded(chosen) for chosen in (stored, fused)}
    less = found[False].peaks.allocated_bytes - found[True].peaks.allocated_bytes
    assert found[False].peaks.peak_phase == "loss"
    assert less / LOGITS == pytest.approx(spared, abs=0.3)
