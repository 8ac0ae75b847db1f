"""Models and runs: a tiny one, and measured ones."""

from typing import Any

from tests.support.preflight_examples import llama_shape, setup
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.step_plan.plan import StepPlan

tiny = llama_shape(layers=3, hidden=30, feed_forward=46, heads=3, kv_heads=1, vocab=101)


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
