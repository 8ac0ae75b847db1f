"""Models and runs whose memory tests predict: drawn at random, tiny, and measured ones."""

from typing import Any

from hypothesis import strategies as st

from tests.support.preflight_examples import SEVEN, llama_shape, setup
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.memory.closed_form import predict
from workflow.lib.step_plan.plan import StepPlan

tiny = llama_shape(layers=3, hidden=30, feed_forward=46, heads=3, kv_heads=1, vocab=101)
small_shapes = st.builds(
    lambda layers, kv, group, dim, feed_forward, vocab, tied: llama_shape(
        layers=layers, hidden=kv * group * dim, feed_forward=feed_forward, heads=kv * group,
        kv_heads=kv, vocab=vocab, tied=tied,
    ),
    st.integers(1, 7), st.integers(1, 3), st.integers(1, 4), st.integers(2, 65),
    st.integers(1, 3001), st.integers(2, 50021), st.booleans(),
)  # fmt: skip
setups = st.builds(
    setup,
    processes=st.integers(1, 9),
    micro_batch_size=st.integers(1, 5),
    seq_len=st.integers(8, 4099),
    rank=st.integers(1, 67),
    targets=st.sampled_from([SEVEN, ("q_proj",), ("down_proj", "k_proj")]),
    dropout=st.sampled_from([0.0, 0.05]),
    block_size=st.sampled_from([64, 256]),
    double_quant=st.booleans(),
    activation_checkpointing=st.sampled_from([True, False, 1, 2, 3]),
    reshard_after_forward=st.booleans(),
    accumulation_steps=st.sampled_from([1, 3]),
    compute_dtype=st.sampled_from(["bfloat16", "float32"]),
    attention=st.sampled_from(["flash", "sdpa", "eager"]),
    fused_layers=st.booleans(),
    offload_activations=st.sampled_from([False, 1, 2, True]),
)


def peak(shape: ModelShape, chosen: StepPlan) -> int:
    return predict(shape, chosen).peak_bytes


def measured_case(row: dict[str, Any]) -> tuple[ModelShape, StepPlan]:
    sizes = {
        4096: {"feed_forward": 14336, "heads": 32, "kv_heads": 8},
        8192: {"feed_forward": 28672, "heads": 64, "kv_heads": 8},
    }[row["h"]]
    shape = llama_shape(layers=row["L"], hidden=row["h"], vocab=row["V"], tied=row["tied"], **sizes)
    chosen = setup(
        processes=row["P"], micro_batch_size=row["B"], seq_len=row["S"], rank=row["r"],
        dropout=float(row["drop"]), activation_checkpointing=row["ckpt"],
        reshard_after_forward=row["reshard"], accumulation_steps=row["accum"],
        attention=row["attn"] if row["packed"] else "flash",
    )  # fmt: skip
    return shape, chosen
