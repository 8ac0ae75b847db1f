"""Seconds of made-up work by hand, and what runs beside what."""

from dataclasses import replace

import pytest

from tests.support.preflight_examples import setup
from workflow.lib.planning import work as kinds
from workflow.lib.planning.timing.rates import CPU, rates_of
from workflow.lib.planning.timing.step_time import (
    NOT_HIDDEN,
    UPDATE_LAUNCH,
    Clock,
    Fabric,
    cpu_seconds,
    estimate,
    fabric_of,
    ring_seconds,
)
from workflow.lib.planning.work import BESIDE, UPDATE, Amount, Work, summed
from workflow.lib.system.gpu_models import BY_NAME

ROUND = Fabric("made up", gpus_per_node=4, local=8e9, network=2e9)


def test_ring_inside_a_node_by_hand():
    # 4 GPUs: each receives 3/4 of 8 GB at 80% of 8 GB/s, in 3 hops
    assert ring_seconds(8e9, ROUND, processes=4) == pytest.approx(6 / 6.4 + 3 * 2e-6)


def test_ring_over_nodes_waits_for_the_slower_of_link_and_network():
    # 3 nodes of 4: each node receives 2/3 of 6 GB at 80% of 2 GB/s; 9 hops inside, 3 between
    assert ring_seconds(6e9, ROUND, processes=12) == pytest.approx(4 / 1.6 + 9 * 2e-6 + 3 * 1e-5)


def test_rings_over_replicas_share_the_network_of_a_node():
    # one GPU of each of 3 nodes; the 4 rings of the 4 GPUs at once
    assert ring_seconds(6e9, ROUND, processes=3, stride=4) == pytest.approx(4 * 4 / 1.6 + 3 * 1e-5)


H200 = BY_NAME["NVIDIA H200"]
RATES = replace(
    rates_of(H200),
    gap_s=0.0,
    flops={kinds.MATMUL: 1e12, kinds.EQUAL: 5e11, kinds.SHORT: 5e11},
    memory=1e12,
    decoding=2e12,
    launch_s=1e-3,
    pause_s=0.01,
    host=1e10,
    attention=4.0,
)
GRAPHED = setup(processes=1, attention="varlen", cuda_graphs=True)
LAUNCHED = replace(GRAPHED, cuda_graphs=False)
FORWARD = {f"{kinds.MATMUL}@10": Amount(1e12, 0.0, 1.0)}  # 1 s
BACKWARD = {f"{kinds.MATMUL}@10": Amount(2e12, 0.0, 1.0)}
WORK = Work({"forward": FORWARD, "backward": BACKWARD})


def parts(work=WORK, *, plan=GRAPHED, gpu=H200, rates=RATES, **options):
    settings = {"num_layers": 4, "trained_share": 1.0} | options
    clock = Clock(gpu, fabric_of(gpu, gpus_per_node=max(2, plan.processes)), rates)
    return clock.parts(work, plan, **settings)


def test_matmuls_take_their_flop_or_their_bytes_whichever_takes_longer():
    """And an eighth of the other."""
    thin = Work({"forward": {f"{kinds.MATMUL}@3": Amount(1e11, 5e11, 1.0)}})
    assert parts()["matmuls"] == pytest.approx(3.0)
    assert parts(thin)["matmuls"] == pytest.approx(0.5 + NOT_HIDDEN * 0.1)


def test_attention_takes_its_bytes_beside_its_flop():
    """So that a FLOP of short documents takes longer."""
    work = Work({"forward": {f"{kinds.EQUAL}@10": Amount(1e12, 1e11, 1.0)}})
    assert parts(work)["attention"] == pytest.approx(2.0 + 4 * 0.1)


def test_attention_of_short_documents_reads_its_bytes_once():
    work = Work({"forward": {f"{kinds.SHORT}@3": Amount(1e12, 1e12, 1.0)}})
    assert parts(work)["attention"] == pytest.approx(2.0 + 1.0)


def test_kernels_of_the_optimizer_are_launched_in_half_the_time():
    update = Work({UPDATE: {kinds.MEMORY: Amount(0.0, 1.0, 1000.0)}})
    waited = parts(update)["waiting_for_python"]
    assert waited == pytest.approx(UPDATE_LAUNCH * 1000 * RATES.launch_s, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "amount", "part", "seconds"),
    [
        (kinds.DECODE, Amount(0.0, 1e12, 4.0), "dequantization", 0.5),
        (f"{kinds.EQUAL}@10", Amount(1e12, 0.0, 4.0), "attention", 2.0),
        (kinds.MEMORY, Amount(0.0, 1e12, 4.0), "elementwise", 1.0),
    ],
)
def test_each_kind_has_its_own_rate_and_part(kind, amount, part, seconds):
    assert parts(Work({"forward": {kind: amount}}))[part] == pytest.approx(seconds)


def test_every_call_takes_a_gap_more():
    gaps = replace(RATES, gap_s=0.25)
    assert sum(parts(rates=gaps).values()) - sum(parts().values()) == pytest.approx(0.5)


def test_loss_counts_trained_tokens_and_the_update_once_a_step():
    moved = {kinds.MEMORY: Amount(0.0, 1e12, 1.0)}
    found = parts(Work({"loss": moved, UPDATE: moved}), trained_share=0.25, micro_batches=4)
    assert (found["loss"], found["update"]) == (pytest.approx(0.25), pytest.approx(0.25))


def test_forward_passes_of_a_reference_take_forward_and_loss_again():
    of_answers = replace(GRAPHED, objective="kto", start_reference=True)
    seconds = {plan.forward_passes: parts(plan=plan) for plan in (GRAPHED, of_answers)}
    more = {phase: amounts for phase, amounts in WORK.phases.items() if phase == "forward"}
    forward_s = parts(Work(more))["matmuls"]
    assert seconds[3]["matmuls"] - seconds[1]["matmuls"] == pytest.approx(2 * forward_s)


def test_seconds_of_a_sum_with_factors_are_the_sum_of_seconds():
    """So lines between recordings may subtract one whose matmuls are bound by something else."""
    other = Work({"forward": {f"{kinds.MATMUL}@3": Amount(1e9, 5e11, 1.0)}})
    made = summed([(WORK, 2.0), (other, -1.0)])
    assert parts(made)["matmuls"] == pytest.approx(2 * 3.0 - parts(other)["matmuls"])


def test_python_is_waited_for_where_it_launches_longer_than_the_gpu_computes():
    many = Work({"forward": {kinds.MEMORY: Amount(0.0, 1e10, 500.0)}})
    launched, graphed = parts(many, plan=LAUNCHED), parts(many)
    assert graphed["waiting_for_python"] == 0.0
    assert launched["waiting_for_python"] == pytest.approx(500 * RATES.launch_s - 0.01)


def test_passes_of_reference_and_estimate_are_launched_by_python_beside_graphs():
    many = Work({"forward": {kinds.MEMORY: Amount(0.0, 1e10, 500.0)}})
    of_answers = replace(GRAPHED, objective="kto", start_reference=True)
    waited = parts(many, plan=of_answers)["waiting_for_python"]
    assert waited == pytest.approx(2 * 500 * RATES.launch_s - 3 * 0.01)


def test_kernels_of_backward_wait_for_forward_to_be_launched():
    """Though Python takes no longer than the GPU in all."""
    few = {kinds.MEMORY: Amount(0.0, 5e11, 1.0)}
    many = {kinds.MEMORY: Amount(0.0, 1e11, 500.0)}
    late, early = (
        parts(Work({"forward": forward, "backward": backward}), plan=LAUNCHED)["waiting_for_python"]
        for forward, backward in ((many, few), (few, many))
    )
    assert late == pytest.approx(500 * RATES.launch_s - 0.1)
    assert early == 0.0


def test_matmuls_by_experts_are_launched_more_slowly():
    experts = Work({"forward": {f"{kinds.GROUPED}@10": Amount(1.0, 1.0, 500.0)}})
    rates = replace(RATES, flops=RATES.flops | {kinds.GROUPED: 1e12}, prepared_launch_s=2e-3)
    waited = parts(experts, plan=LAUNCHED, rates=rates)["waiting_for_python"]
    assert waited == pytest.approx(1.0)


def test_copies_hide_behind_python_too():
    brought = {kinds.FROM_HOST: Amount(0.0, 1e10, 1.0), kinds.MEMORY: Amount(0.0, 1e9, 400.0)}
    found = parts(Work({"backward": brought}), plan=LAUNCHED)  # 1 s of copies, 0.4 s of Python
    waited = found["waiting_for_python"] + found["waiting_for_the_host"]
    assert waited == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    ("amount", "plan", "part"),
    [
        (Amount(0.0, 1e9, 4000.0), LAUNCHED, "Python's speed"),
        (Amount(0.0, 1e12, 1.0), GRAPHED, "what the GPU computes"),
    ],
)
def test_range_names_what_makes_most_of_it(amount, plan, part):
    clock = Clock(H200, fabric_of(H200, gpus_per_node=2), RATES)
    work = Work({"forward": {kinds.MEMORY: amount}})
    spread = clock.spread(work, plan, num_layers=4, trained_share=1.0)
    middle_s = sum(parts(work, plan=plan).values())
    assert spread.due_to == part
    assert spread.least_s < middle_s < spread.most_s


def test_the_gpu_pauses_once_a_step_where_the_host_reads_the_loss_first():
    assert parts()["waiting_between_steps"] == 0.0
    assert parts(plan=LAUNCHED, micro_batches=4)["waiting_between_steps"] == pytest.approx(0.0025)
    eight_bits = replace(GRAPHED, optimizer="adamw_8bit")
    assert parts(plan=eight_bits)["waiting_between_steps"] == pytest.approx(0.01)


def test_traffic_between_gpus_hides_behind_the_computation_of_its_pass():
    plan = replace(GRAPHED, processes=2)
    gathers = f"{kinds.GATHER}/2/1{BESIDE}"
    free = replace(RATES, collective=1e-9)

    def late(num_bytes):
        work = summed([(WORK, 1.0), (Work({"forward": {gathers: Amount(0.0, num_bytes, 1.0)}}), 1)])
        return parts(work, plan=plan, rates=free)["waiting_for_other_gpus"]

    a_second = 2 * 0.8 * H200.link.bandwidth  # half comes from the other GPU
    assert late(0.9 * a_second) == pytest.approx(0.0, abs=1e-6)
    assert late(1.5 * a_second) == pytest.approx(0.5, abs=1e-4)


def test_what_waits_for_nothing_to_hide_behind_counts_whole():
    plan = replace(GRAPHED, processes=2)
    more = Work({"loss": {f"{kinds.REDUCE}/2/1": Amount(0.0, 0.8 * H200.link.bandwidth, 1.0)}})
    found = parts(summed([(WORK, 1.0), (more, 1.0)]), plan=plan)
    assert found["waiting_for_other_gpus"] == pytest.approx(0.5, abs=1e-4)


def test_copies_to_the_host_hide_behind_forward_and_come_back_behind_backward():
    out, back = Amount(0.0, 1.5e10, 4.0), Amount(0.0, 1.5e10, 4.0)  # 1.5 s each
    work = summed(
        [
            (WORK, 1.0),
            (Work({"forward": {kinds.TO_HOST: out}, "backward": {kinds.FROM_HOST: back}}), 1.0),
        ]
    )
    assert parts(work)["waiting_for_the_host"] == pytest.approx(0.5)


def test_layer_from_the_host_is_late_by_what_the_layer_before_it_does_not_cover():
    """Forward has a quarter of a second a layer."""
    plan = replace(LAUNCHED, offload_layers=2)

    def late(seconds):
        brought = Work({"forward": {kinds.FROM_HOST: Amount(0.0, 2e10 * seconds, 2.0)}})
        found = parts(summed([(WORK, 1.0), (brought, 1.0)]), plan=plan)
        return found["waiting_for_the_host"]

    assert late(0.2) == 0.0
    assert late(0.4) == pytest.approx(2 * 0.15)


def test_cpu_takes_flop_bytes_and_calls_one_after_the_other():
    by_hand = 3e12 / CPU.flops + 3e9 / CPU.memory + 3 * CPU.call_s
    moved = Work({"forward": {kinds.MEMORY: Amount(0.0, 3e9, 1.0)}})
    assert cpu_seconds(summed([(WORK, 1.0), (moved, 1.0)]), CPU) == pytest.approx(by_hand)


def estimated(**changes):
    settings = {
        "basis": "a table",
        "num_gpus": 1,
        "tokens": 61,
        "accumulation_steps": 3,
        "num_steps": 7,
        "price_per_gpu_hour": None,
    }
    return estimate(parts(), **(settings | changes))


def test_total_is_steps_of_micro_batches():
    time, micro_s = estimated(), sum(parts().values())
    assert time.step_s == pytest.approx(3 * micro_s)
    assert time.total_h == pytest.approx(7 * 3 * micro_s / 3600)
    assert time.tokens_per_s_per_process == pytest.approx(61 / micro_s)


def test_cost_counts_every_gpu():
    priced = estimated(num_gpus=4, price_per_gpu_hour=2.5)
    assert priced.cost == pytest.approx(priced.total_h * 4 * 2.5)


def test_there_is_no_cost_without_a_price_or_on_the_cpu():
    assert estimated().cost is None
    assert estimated(num_gpus=0, price_per_gpu_hour=2.5).cost is None
