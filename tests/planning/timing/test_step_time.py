"""The time model against what was measured on H200, by hand, and where things run beside each
other."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.preflight_examples import llama_70b, setup
from workflow.lib.model.architecture.model_shape import Linear
from workflow.lib.planning.timing.gpu_traffic import Traffic
from workflow.lib.planning.timing.step_time import (
    EXPERT_WEIGHTS_SHARE,
    LOSS_SHARE,
    ROUNDING_LAUNCH_S,
    estimate,
    gpu_parts,
    gpu_seconds,
    launch_seconds,
)
from workflow.lib.planning.timing.step_time import H200 as H200_CONSTANTS
from workflow.lib.planning.timing.step_work import Work, micro_batch_work
from workflow.lib.system.gpu_models import BY_NAME

H200 = "NVIDIA H200"
WORK = Work(4e12, 1e12, 3e9, 5e9, 9, 1 / 3)


def estimated(work=WORK, **changes):
    settings: dict[str, Any] = {
        "basis": "a table",
        "num_gpus": 1,
        "tokens": 61,
        "accumulation_steps": 3,
        "num_steps": 7,
        "price_per_gpu_hour": None,
    }
    return estimate(gpu_parts(work, BY_NAME[H200]), **(settings | changes))


def test_product_work_of_one_layer_by_hand():
    shape = llama_70b(layers=1, vocab=32000)
    linears = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    adapters = 16 * (2 * 16384 + 2 * 9216 + 3 * 36864)
    work = micro_batch_work(shape, setup(seq_len=100), trained_share=0.5)
    not_recomputed = 2 * 8192 * 28672  # the down projection
    head = 2 * 32000 * 8192
    assert work.product_flops == 100 * (6 * linears - not_recomputed + 8 * adapters + head)


def test_rounded_activations_halve_what_waits_and_are_read_and_written_twice():
    shape = llama_70b(layers=8)
    plain = setup(activation_checkpointing=False, fused_layers=True, offload_activations=6)
    chosen = replace(plain, saved_activations="float8")
    exact, rounded = (micro_batch_work(shape, x, trained_share=1.0) for x in (plain, chosen))
    assert rounded.stashed_bytes / exact.stashed_bytes == 33 / 64
    elements = plain.tokens * (8192 + 8192 + 2 * 1024 + 8192 + 2 * 28672 + 8192)
    assert rounded.rounded_bytes == 8 * 2 * elements * (2 + 33 / 32)
    assert exact.rounded_bytes == 0
    assert (exact.rounding_passes, rounded.rounding_passes) == (0, 16)
    launches = [launch_seconds(x, H200_CONSTANTS, Traffic(1.0, 0.0, 0.0)) for x in (exact, rounded)]
    assert launches[1] - launches[0] == pytest.approx(16 * ROUNDING_LAUNCH_S)
    assert rounded.kept_bytes == exact.kept_bytes
    eight = Traffic(0.0, 0.0, 0.0, gpus_of_host=8)
    parts = [gpu_parts(work, BY_NAME[H200], traffic=eight) for work in (exact, rounded)]
    assert parts[1]["waiting_for_the_host"] < parts[0]["waiting_for_the_host"]
    assert parts[1]["elementwise"] > parts[0]["elementwise"]
    recomputed = replace(chosen, activation_checkpointing=True)
    assert micro_batch_work(shape, recomputed, trained_share=1.0).rounded_bytes == 0


def test_work_of_experts_is_that_of_those_that_a_token_takes():
    """2 of 8: matmuls 1.4 times as long as dense ones, of which recomputation spares the last; all
    of them are decoded in each pass, and read. Their adapters are bound by the rows that they read.
    """
    shape, width = llama_70b(layers=1, vocab=32000), 8 * 512
    stacks = (Linear("e.gate_up_proj", 2 * width, 8192, 8), Linear("e.down_proj", 8 * 8192, 512, 8))
    dense = shape.kinds[0].linears[:4]
    layer = replace(shape.kinds[0], linears=(*dense, *stacks), top_k=2)
    chosen = setup(seq_len=100, targets=("down_proj",))
    work = micro_batch_work(replace(shape, kinds=(layer,)), chosen, trained_share=0.0)
    weights, down = 2 * 8192 * 8192 + 2 * 8192 * 1024, 8192 * 512
    used = 3 * 3 * 2 * down - 2 * down
    assert work.product_flops == pytest.approx(100 * 2 * 3 * weights)
    assert work.expert_flops == pytest.approx(100 * 2 * 1.4 * used)
    assert work.expert_weight_bytes == 2 * (3 * 8 * 3 * down - 8 * down)
    assert work.dequantized_bytes == 2.5 * (3 * (weights + 8 * 3 * down) - 8 * down)
    read = 2 * (3 * 512 + 2 * 8192)
    assert work.expert_adapter_bytes == 100 * chosen.compute_bytes * read


@pytest.mark.parametrize(("rows", "bound"), [(64, "bytes"), (4096, "flops")])
def test_products_of_few_rows_take_what_reading_experts_takes(rows, bound):
    flops, read = rows * 2e9, 2e9
    gpu = BY_NAME[H200]
    with_experts = replace(WORK, expert_flops=flops, expert_weight_bytes=read)
    seconds = {
        "bytes": read / (gpu.bandwidth * EXPERT_WEIGHTS_SHARE),
        "flops": flops / (gpu.flops * H200_CONSTANTS.product_share),
    }
    assert max(seconds, key=lambda name: seconds[name]) == bound
    more_s = gpu_parts(with_experts, gpu)["products"] - gpu_parts(WORK, gpu)["products"]
    assert more_s == pytest.approx(seconds[bound])


def test_attention_work_counts_keys_and_values_by_their_widths():
    shape = llama_70b(layers=1)
    narrow = replace(shape, kinds=(replace(shape.kinds[0], value_dim=64),))
    whole, less = (
        micro_batch_work(x, setup(), trained_share=1.0).attention_flops for x in (shape, narrow)
    )
    assert less == 0.75 * whole


def graphed(**changes):
    return setup(cuda_graphs=True, **changes)


@pytest.mark.parametrize(
    ("chosen", "micro_batches", "pauses"),
    [
        (setup(), 1, 1.0),
        (setup(), 4, 0.25),
        (graphed(), 1, 0.0),
        (graphed(optimizer="adamw_8bit"), 1, 1.0),
        (graphed(attention="sdpa"), 1, 1.0),
    ],
    ids=["python", "four", "graphs", "the host decides", "no graphs"],
)
def test_gpu_pauses_once_a_step_unless_the_next_is_launched_ahead(chosen, micro_batches, pauses):
    work = micro_batch_work(llama_70b(), chosen, trained_share=1.0, micro_batches=micro_batches)
    assert work.pauses == pauses
    parts = gpu_parts(work, BY_NAME[H200])
    assert parts["waiting_between_steps"] == pauses * H200_CONSTANTS.pause_s


def test_update_moves_50_bytes_for_each_trained_weight_of_a_shard_once_a_step():
    shape = llama_70b(layers=1)
    weights = 16 * (2 * 16384 + 2 * 9216 + 3 * 36864)
    work = micro_batch_work(shape, setup(processes=2), trained_share=1.0, micro_batches=4)
    assert work.update_bytes == 50 * weights / 2 / 4
    update_s = gpu_parts(work, BY_NAME[H200])["update"]
    assert update_s == pytest.approx(work.update_bytes / BY_NAME[H200].bandwidth)


@pytest.mark.parametrize(("capped", "num_bytes"), [(False, 36), (True, 88)])
def test_loss_moves_so_many_bytes_for_each_logit_of_a_trained_token(capped, num_bytes):
    shape = replace(llama_70b(vocab=1000), logit_softcap=capped)
    work = micro_batch_work(shape, setup(seq_len=100), trained_share=0.5)
    assert work.logit_bytes == 50 * 1000 * num_bytes
    gpu = BY_NAME[H200]
    loss_s = 50_000 * num_bytes / (gpu.bandwidth * LOSS_SHARE)
    assert gpu_parts(work, gpu)["loss"] == pytest.approx(loss_s)


@pytest.mark.parametrize(
    ("where", "forward", "backward"), [("both", 2, 1), ("forward", 2, 0), ("backward", 0, 1)]
)
def test_products_in_8_bits_decode_to_a_byte_and_round_what_they_multiply(where, forward, backward):
    shape = llama_70b(layers=1)
    plain = setup(seq_len=100, compute_dtype="bfloat16")
    chosen = replace(plain, matmul_dtype="float8", matmul_passes=where)
    exact, eight = (micro_batch_work(shape, x, trained_share=1.0) for x in (plain, chosen))
    inputs, gradients = 3 * 8192 + 28672, 3 * 8192 + 2 * 1024 + 2 * 28672
    assert exact.rounded_bytes == 0
    assert eight.rounded_bytes == 100 * 3 * (forward * inputs + backward * gradients)
    spared = exact.dequantized_bytes * (forward + backward) / 3 * (1 - 1.5 / 2.5)
    assert exact.dequantized_bytes - eight.dequantized_bytes == pytest.approx(spared)


def test_experts_are_decoded_to_a_byte_in_float8():
    shape = llama_70b(layers=1)
    stack = Linear("e.up_proj", 8 * 512, 8192, 8)
    layer = replace(shape.kinds[0], linears=(stack,), top_k=2)
    shape = replace(shape, kinds=(layer,))
    chosen = setup(activation_checkpointing=False)
    decoded = {
        dtype: micro_batch_work(
            shape, replace(chosen, matmul_dtype=dtype), trained_share=1.0
        ).dequantized_bytes
        for dtype in ("compute_dtype", "float8")
    }
    assert decoded["float8"] == 0.6 * decoded["compute_dtype"]


def test_without_recomputation_there_is_a_third_less():
    kept = micro_batch_work(llama_70b(), setup(activation_checkpointing=False), trained_share=0.0)
    recomputed = micro_batch_work(llama_70b(), setup(), trained_share=0.0)
    down = 28672 / (
        3 * 28672 + 2 * 8192 + 2 * 1024
    )  # its share of the weights is made again by neither
    expected = 2 / (3 - down)
    assert kept.product_flops / recomputed.product_flops == pytest.approx(expected, rel=0.01)
    assert kept.layer_passes / recomputed.layer_passes == pytest.approx(2 / 3)


def test_short_micro_batches_wait_for_python():
    work = micro_batch_work(llama_70b(layers=8), setup(seq_len=16), trained_share=1.0)
    assert gpu_seconds(work, BY_NAME["NVIDIA B200"]) == pytest.approx(
        8 * 3 * H200_CONSTANTS.launch_s
    )


def test_total_is_steps_of_micro_batches():
    time = estimated()
    micro_s = gpu_seconds(WORK, BY_NAME[H200])
    assert time.step_s == pytest.approx(3 * micro_s)
    assert time.total_h == pytest.approx(7 * 3 * micro_s / 3600)
    assert time.tokens_per_s_per_process == pytest.approx(61 / micro_s)


def test_cost_counts_every_gpu():
    priced = estimated(num_gpus=4, price_per_gpu_hour=2.5)
    assert priced.cost == pytest.approx(priced.total_h * 4 * 2.5)


def test_there_is_no_cost_without_a_price_or_on_the_cpu():
    assert estimated().cost is None
    assert estimated(num_gpus=0, price_per_gpu_hour=2.5).cost is None


def test_traffic_between_gpus_hides_behind_compute():
    gpu = BY_NAME[H200]
    alone = gpu_parts(WORK, gpu, traffic=Traffic(0.0, 0.001, 0.0))
    compute_s = sum(alone.values()) - 0.001
    hidden, late = (
        gpu_parts(WORK, gpu, traffic=Traffic(share * compute_s, 0.001, 0.0)) for share in (0.9, 1.5)
    )
    assert hidden == alone
    assert late["waiting_for_other_gpus"] == pytest.approx(0.5 * compute_s + 0.001)


def test_activations_leave_and_come_back_behind_compute_as_far_as_the_slot_allows():
    gpu = BY_NAME[H200]
    compute_s = gpu_seconds(WORK, gpu)
    a_third = int(compute_s / 3 * gpu.host_bandwidth * H200_CONSTANTS.host_share)
    hidden, late = (
        gpu_parts(replace(WORK, stashed_bytes=size), gpu) for size in (a_third, 2 * a_third)
    )
    assert hidden["waiting_for_the_host"] == pytest.approx(0.0, abs=1e-3 * compute_s)
    # twice a third: behind forward (a third) only half of it, behind the rest (two thirds) all
    assert late["waiting_for_the_host"] == pytest.approx(compute_s / 3, rel=0.02)


def test_on_pcie_activations_and_weights_share_the_slot():
    gpu = BY_NAME["NVIDIA GeForce RTX 4090"]
    third = int(gpu_seconds(WORK, gpu) / 3 * gpu.host_bandwidth * H200_CONSTANTS.host_share)
    stashed = replace(WORK, stashed_bytes=third)
    alone = gpu_parts(stashed, gpu)
    compute_s = sum(alone.values()) - alone["waiting_for_the_host"]
    assert alone["waiting_for_the_host"] == pytest.approx(0, abs=0.01 * compute_s)
    traffic = Traffic(0.5 * compute_s, 0.0, 0.0)
    assert gpu_parts(WORK, gpu, traffic=traffic)["waiting_for_other_gpus"] == 0.0
    both = gpu_parts(stashed, gpu, traffic=traffic)  # 2/3 out and back, and 1/2
    assert both["waiting_for_other_gpus"] == pytest.approx(compute_s / 6, rel=0.1)


def test_layer_from_the_host_is_late_by_what_the_layer_before_it_does_not_cover():
    gpu = BY_NAME[H200]
    hosting = replace(WORK, layers=3, hosted_layers=2)
    forward_s = gpu_seconds(WORK, gpu) * WORK.forward_share / 3  # of one layer
    covered = int(0.9 * forward_s * gpu.host_bandwidth * H200_CONSTANTS.host_share)
    assert gpu_seconds(replace(hosting, hosted_bytes=covered), gpu) == gpu_seconds(WORK, gpu)
    late = gpu_parts(replace(hosting, hosted_bytes=2 * covered), gpu)["waiting_for_the_host"]
    assert late == pytest.approx(2 * 0.8 * forward_s)  # backward takes twice as long: covered


def test_gpu_waits_for_embedding_rows_from_the_host():
    rows = replace(WORK, looked_up_bytes=int(H200_CONSTANTS.lookup_bandwidth / 100))
    seconds = gpu_seconds(rows, BY_NAME[H200]) - gpu_seconds(WORK, BY_NAME[H200])
    assert seconds == pytest.approx(0.01)
