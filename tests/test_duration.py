"""The time model against what was measured on H200, and how it speaks about what it does not know."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.preflight_examples import llama_70b, setup
from tests.test_memory import measured_case
from workflow.lib.duration import CPU_FLOPS, Work, estimate, gpu_seconds, micro_batch_work
from workflow.lib.gpus import BY_NAME

H200 = "NVIDIA H200"
MEASURED = [
    json.loads(line)
    for line in (Path(__file__).parent / "measured_h200.jsonl").read_text().splitlines()
]
# The constants are fitted to these runs; short ones depend on the host's Python. Eager attention is left out:
# nobody waits for it.
TOLERANCE = 0.25
WORK = Work(4e12, 1e12, 3e9, 5e9, 9)


def estimated(work: Work = WORK, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"gpu_names": (H200,), "tokens": 61, "accumulation_steps": 3, "num_steps": 7, "price_per_gpu_hour": None}  # fmt: skip
    return estimate(work, **(settings | changes))


@pytest.mark.parametrize(
    "row",
    [row for row in MEASURED if row["attn"] != "eager"],
    ids=lambda r: "-".join(str(v) for v in r.values()),
)
def test_step_takes_what_it_took_on_h200(row: dict[str, Any]) -> None:
    shape, chosen = measured_case(row)
    work = micro_batch_work(shape, chosen, trained_share=1.0)
    seconds = row["accum"] * gpu_seconds(work, BY_NAME[H200])
    assert seconds == pytest.approx(row["step_s"], rel=TOLERANCE)


def test_product_work_of_one_layer_by_hand() -> None:
    shape = llama_70b(layers=1, vocab=32000)
    linears = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    adapters = 16 * (2 * 16384 + 2 * 9216 + 3 * 36864)
    work = micro_batch_work(shape, setup(seq_len=100), trained_share=0.5)
    assert work.product_flops == 100 * (6 * linears + 8 * adapters + 2 * 32000 * 8192)


def test_without_recomputation_there_is_a_third_less() -> None:
    kept = micro_batch_work(llama_70b(), setup(activation_checkpointing=False), trained_share=0.0)
    recomputed = micro_batch_work(llama_70b(), setup(), trained_share=0.0)
    assert kept.product_flops / recomputed.product_flops == pytest.approx(2 / 3, rel=0.01)
    assert kept.layer_passes / recomputed.layer_passes == pytest.approx(2 / 3)


def test_recomputing_every_fourth_layer_costs_a_quarter_of_recomputing_all() -> None:
    some, every, none = (
        micro_batch_work(llama_70b(), setup(activation_checkpointing=k), trained_share=0.0)
        for k in (4, 1, False)
    )
    assert some.layer_passes - none.layer_passes == (every.layer_passes - none.layer_passes) / 4


def test_masked_attention_does_twice_the_work_of_causal() -> None:
    causal = micro_batch_work(llama_70b(), setup(), trained_share=1.0)
    masked = micro_batch_work(llama_70b(), setup(attention="sdpa"), trained_share=1.0)
    assert masked.attention_flops == 2 * causal.attention_flops


def test_short_micro_batches_wait_for_python() -> None:
    work = micro_batch_work(llama_70b(layers=8), setup(seq_len=16), trained_share=1.0)
    assert gpu_seconds(work, BY_NAME["NVIDIA B200"]) == pytest.approx(8 * 3 * 3.3e-3)


def test_unknown_gpu_has_no_estimate_and_is_named() -> None:
    found = estimated(gpu_names=(H200, "NVIDIA Future 9000"))
    assert found == {
        "step_s": None,
        "total_h": None,
        "tokens_per_s_per_process": None,
        "cost": None,
        "basis": "unknown: no speed is recorded for NVIDIA Future 9000",
    }


def test_slowest_gpu_decides() -> None:
    both = estimated(gpu_names=(H200, "NVIDIA GeForce RTX 3090"))
    assert both["step_s"] == estimated(gpu_names=("NVIDIA GeForce RTX 3090",))["step_s"]


def test_cpu_time_is_called_rough() -> None:
    found = estimated(gpu_names=())
    assert found["basis"].startswith("rough:")
    assert found["step_s"] == pytest.approx(3 * 5e12 / CPU_FLOPS)


def test_gpu_time_is_called_uncalibrated() -> None:
    assert estimated()["basis"].startswith("uncalibrated roofline for NVIDIA H200")


def test_total_is_steps_of_micro_batches() -> None:
    found = estimated()
    micro_s = gpu_seconds(WORK, BY_NAME[H200])
    assert found["step_s"] == pytest.approx(3 * micro_s)
    assert found["total_h"] == pytest.approx(7 * 3 * micro_s / 3600)
    assert found["tokens_per_s_per_process"] == pytest.approx(61 / micro_s)


def test_cost_counts_every_gpu() -> None:
    priced = estimated(gpu_names=(H200,) * 4, price_per_gpu_hour=2.5)
    assert priced["cost"] == pytest.approx(priced["total_h"] * 4 * 2.5)


def test_there_is_no_cost_without_a_price_or_on_the_cpu() -> None:
    assert estimated()["cost"] is None
    assert estimated(gpu_names=(), price_per_gpu_hour=2.5)["cost"] is None
