"""The replay of a plan's allocations against measurements on GPUs, the closed form, and properties
that it must have.
"""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.measurements import PAGE, Row, rows, written
from tests.support.preflight_examples import SEVEN, llama_70b, llama_shape, setup
from workflow.lib.model.architecture.model_shape import DecoderLayer, ModelShape
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.memory.closed_form import predict
from workflow.lib.planning.memory.explanations import EXPLANATIONS
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.trace_step import step_trace
from workflow.lib.system.units import GIB


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    return rows()


def test_allocated_peak_is_what_gpus_measured(measured: list[Row]) -> None:
    errors = [row.allocated_error for row in measured]
    assert len(errors) >= 40
    assert median(map(abs, errors)) <= 0.001
    assert -0.002 <= min(errors) <= max(errors) <= 0.01


def test_reserved_peak_is_near_what_gpus_measured(measured: list[Row]) -> None:
    errors = [abs(row.reserved_error) for row in measured]
    assert median(errors) <= 0.01
    assert max(errors) <= 0.06


def test_page_shows_the_measurements_beside_what_is_predicted_now(measured: list[Row]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page, measured) == page, "run python -m tests.support.measurements"


@pytest.mark.parametrize("rank", [4, 16])
def test_soft_capped_attention_is_predicted_no_lower_than_a_gpu_measured(rank: int) -> None:
    """10 layers of Gemma 2 27B, all activations kept, 2 rows of 3,072 tokens, one H200: 70.0
    GiB.
    """
    config = {
        "model_type": "gemma2",
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_hidden_layers": 10,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    shape = describe_config(config, origin=Path("gemma-2-27b"))
    chosen = setup(
        processes=1,
        micro_batch_size=2,
        seq_len=3072,
        rank=rank,
        attention="eager",
        fused_layers=True,
        activation_checkpointing=False,
    )
    exact = replay(shape, chosen).allocated_bytes
    assert 70.0 * GIB <= exact <= 1.01 * 70.0 * GIB
    assert exact <= predict(shape, chosen).peak_bytes <= 1.02 * exact


tiny = llama_shape(layers=3, hidden=96, feed_forward=160, heads=3, kv_heads=1, vocab=1009)
setups = st.builds(
    setup,
    processes=st.sampled_from([1, 2, 4, 9]),
    micro_batch_size=st.integers(1, 3),
    seq_len=st.sampled_from([64, 96]),
    rank=st.integers(1, 9),
    targets=st.sampled_from([SEVEN, ("q_proj",), ("down_proj", "k_proj")]),
    dropout=st.booleans(),
    dora=st.booleans(),
    double_quant=st.booleans(),
    activation_checkpointing=st.sampled_from([True, False, 2]),
    reshard_after_forward=st.booleans(),
    accumulates=st.booleans(),
    compute_bytes=st.sampled_from([2, 4]),
    attention=st.sampled_from(["flash", "flex", "sdpa", "eager"]),
    fused_layers=st.booleans(),
    offload_activations=st.sampled_from([False, 1, 2, True]),
    offload_embedding=st.booleans(),
    offload_layers=st.integers(0, 3),
    trains_head=st.booleans(),
    trains_embedding=st.booleans(),
)


def possible(chosen: Setup, *, tied: bool = False) -> Setup:
    """A tied table cannot be trained, and one that is trained is on the device."""
    trained = {
        name: getattr(chosen, name) and not tied for name in ("trains_head", "trains_embedding")
    }
    away = chosen.offload_embedding and not trained["trains_embedding"]
    return replace(chosen, **trained, offload_embedding=away)


LLAMA = tiny.kinds[0]
# Kinds of layers, of which a model has one or takes turns with another.
KINDS = (
    LLAMA,
    replace(LLAMA, norms_before=False, norms_after=True, fused_attention=False),
    replace(LLAMA, hidden_norms=4, norms_after=True, attention_softcap=True, fused_norms=False),
    replace(LLAMA, head_norms=(30, 10), norm_bytes=8, fused_norms=False),
    # Keys that are the values too; a feed-forward without a gate.
    replace(
        LLAMA,
        linears=tuple(x for x in LLAMA.linears if x.name not in ("v_proj", "gate_proj")),
        attention_linears=3,
        head_norms=(30, 10, 10),
        feed_forward_tensors=1,
        fused_attention=False,
        fused_feed_forward=False,
    ),
)
kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=2, unique=True)


@settings(deadline=None, max_examples=60)
@given(setups, kinds, st.booleans())
def test_whatever_is_made_in_training_is_released(
    chosen: Setup, kinds: list[DecoderLayer], tied: bool
) -> None:
    """After the second step only parameters, moments, workspaces, one batch of inputs and fetched
    layers are there.
    """
    order = (0, len(kinds) - 1, 0)
    shape = replace(tiny, kinds=tuple(kinds), order=order, tied_embeddings=tied)
    tape = step_trace(shape, possible(chosen, tied=tied))
    left: set[int] = set()
    for event in tape.events:
        if isinstance(event, int):
            assert (event >= 0) != (~event in left), "made once, released once"
            left ^= {event if event >= 0 else ~event}
    stay = {
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
        "fetched_layers",
    }
    assert {tape.terms[tensor] for tensor in left} <= stay


@settings(deadline=None, max_examples=30)
@given(setups)
def test_terms_are_explained_and_sum_to_the_peak(chosen: Setup) -> None:
    found = replay(tiny, possible(chosen))
    assert sum(found.terms.values()) == found.allocated_bytes <= found.reserved_bytes
    assert found.allocated_bytes == found.phases[found.peak_phase] == max(found.phases.values())
    assert set(found.terms) <= set(EXPLANATIONS)


@pytest.mark.parametrize(
    "lever",
    [
        {},
        {"fused_layers": True},
        {"activation_checkpointing": False},
        {"activation_checkpointing": 3},
        {"processes": 8},
        {"reshard_after_forward": False},
        {"accumulates": True},
        {"attention": "sdpa"},
        {"offload_embedding": True},
        {"double_quant": False},
        {"trains_head": True},
        {"trains_embedding": True},
        {"trains_head": True, "trains_embedding": True, "accumulates": True},
        {"trains_head": True, "trains_embedding": True, "accumulates": True, "processes": 1},
    ],
    ids=str,
)
def test_closed_form_agrees_with_the_replay(lever: dict[str, object]) -> None:
    shape: ModelShape = llama_70b(layers=12)
    chosen = setup(micro_batch_size=2, **lever)
    exact = replay(shape, chosen).allocated_bytes
    assert predict(shape, chosen).peak_bytes == pytest.approx(exact, rel=0.03)


def test_limit_below_what_is_reserved_is_served_by_giving_back_free_pages() -> None:
    shape, chosen = llama_70b(layers=8), setup(micro_batch_size=2)
    free = replay(shape, chosen)
    tight = replay(shape, chosen, limit_bytes=free.reserved_bytes - GIB // 4)
    assert (tight.lacking_bytes, tight.allocated_bytes) == (0, free.allocated_bytes)
    assert tight.reserved_bytes <= free.reserved_bytes - GIB // 4


def test_limit_below_what_is_allocated_is_lacking() -> None:
    shape, chosen = llama_70b(layers=8), setup(micro_batch_size=2)
    limit = replay(shape, chosen).allocated_bytes - GIB // 4
    assert replay(shape, chosen, limit_bytes=limit).lacking_bytes >= GIB // 4
