"""Seconds of a step from shapes and a table of GPUs: a roofline over the phases of a micro-batch.

A GPU's work is matmuls + attention + dequantization + elementwise traffic, each at a fitted share
of the data sheet. Python's launches, traffic between GPUs and activations to and from the host run
beside it, and count for what they take longer. Units: FLOP, bytes, seconds."""

from dataclasses import dataclass, replace

from workflow.lib.artifacts.preflight_record import Estimate
from workflow.lib.planning.timing.gpu_traffic import NO_TRAFFIC, Traffic
from workflow.lib.planning.timing.step_work import Work
from workflow.lib.system.gpu_models import PCIE_4, PCIE_5, GpuModel


@dataclass(frozen=True)
class Constants:
    """What data sheets do not say. All are above 0."""

    product_share: float  # of the data sheet's FLOP/s in matmuls, and in attention
    attention_share: float
    dequantization_share: float  # of the data sheet's memory bandwidth in dequantization
    elementwise_traffic: float
    """Bytes moved in elementwise work for each byte that autograd keeps and each pass."""
    launch_s: float  # of Python for one pass of one layer, and more for a sharded layer
    sharded_launch_s: float
    gather_traffic: float
    """Bytes of memory traffic, and of waiting counted so, for each gathered byte."""
    host_share: float  # of its PCIe slot's data sheet, in large copies with page-locked memory
    lookup_bandwidth: float
    """Bytes/s at which the host brings embedding rows. The GPU waits for them."""
    pause_s: float
    """How long the GPU waits from a step's end to the first kernel of the next, where the host
    reads the step's loss before it launches that. Where Python decides, it is within its time."""


# Fitted to timings of 1 and 2 H200; docs/time-model.md says to which, and how
# well. But `gather_traffic`: these were timings of layers that FSDP2 had gathered whole, which took
# 10.9. Packed weights are gathered in place since, and six steps of two H100 are within 5% by 4.0
# (November 2026).
H200 = Constants(
    product_share=0.67,
    attention_share=0.384,
    dequantization_share=0.485,
    elementwise_traffic=7.94,
    launch_s=2.55e-3,
    sharded_launch_s=2.5e-3,
    gather_traffic=4.0,
    host_share=0.643,
    lookup_bandwidth=18.7e9,
    pause_s=9.0e-3,
)
# Decoding takes an H100 hardly longer than an H200, so more of its slower memory's bandwidth: 15.1
# ms for 37.4 GB of 12 layers of Qwen3-30B-A3B, where an H200 took 14.4 (profiled, November 2026).
H100 = replace(H200, dequantization_share=0.74)
BY_GPU = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}
"""Of GPUs on which steps were measured."""
# Of the data sheet's memory bandwidth in the loss: on an H100 log-softmax and its gradient moved
# 1.9 TB/s of 3.35, copies beside them more (profiled, November 2026).
LOSS_SHARE = 0.65
# Of the data sheet's memory bandwidth at which matmuls with experts read their weights where each
# has few rows: 4.2 GB in 2.1 to 2.5 ms (gpt-oss-120b, 128 rows), 2.1 GB in 1.2 (Qwen3-Next, 80), on
# an H100 (November 2026).
EXPERT_WEIGHTS_SHARE = 0.55
# Of the data sheet's memory bandwidth in the matmuls of experts' adapters: 12.2 GB in 9.7 ms in
# the widths of Qwen3-30B-A3B on an H100 (profiled, November 2026).
EXPERT_ADAPTER_SHARE = 0.37
# Of Python's time for a pass of a layer without experts: so much more takes one with them. Fitted
# to 12 layers of Qwen3-30B-A3B on an H200.
EXPERT_LAUNCH = 2.0
# Of Python's time for a pass of a layer: the engine's float8 took 3.2 to 6.0 ms a pass of Llama 3
# 8B, median 4.2, in seven runs on four hosts (November 2026).
EIGHT_BIT_LAUNCH = 1.65
# More of Python's time for a pass of a layer that rounds, or restores, its activations: six of a
# plain layer at 0.14 ms, and nine times one at 0.09 ms (torch 2.11, 4,096 rows, November 2026).
ROUNDING_LAUNCH_S = 0.83e-3

# One process with one thread in fp32: 55 to 76 GFLOP/s, measured as docs/memory-model.md says.
CPU_FLOPS = 65e9
# In bfloat16 on a CPU that multiplies it itself: a step took 5.2 s in place of 9.4 in fp32, with
# the same losses (AVX512-BF16, AMD EPYC, torch 2.13, November 2026). One CPU; what others do
# without such matmuls, nobody measured.
CPU_BFLOAT16_FLOPS = CPU_FLOPS * 9.4 / 5.2


Parts = dict[str, float]
# Bytes/s that all GPUs of a host together copy to its memory, or from it: 8 x H200, each with 6 of
# 8 layers' activations of 70B width there, copied 19 GB/s each (November 2026, a virtual machine of
# 128 cores). A host's memory differs; nobody measured others.
HOST_MEMORY_BANDWIDTH = 150e9


def constants_of(gpu: GpuModel) -> Constants:
    """Return the constants of a GPU; of an unmeasured one an H200's, scaled by data sheets."""
    return BY_GPU.get(gpu.name, H200)


def gpu_parts(
    work: Work, gpu: GpuModel, *, constants: Constants = H200, traffic: Traffic = NO_TRAFFIC
) -> Parts:
    """Seconds of a micro-batch on a GPU by what it does or waits for; their sum is the time."""
    gathered = constants.gather_traffic * traffic.gathered_bytes
    product_flops_per_s = gpu.flops * constants.product_share
    parts = {
        "products": work.product_flops / product_flops_per_s
        + max(
            work.expert_flops / product_flops_per_s,
            work.expert_weight_bytes / (gpu.bandwidth * EXPERT_WEIGHTS_SHARE),
        )
        + work.expert_adapter_bytes / (gpu.bandwidth * EXPERT_ADAPTER_SHARE),
        "attention": work.attention_flops / (gpu.flops * constants.attention_share),
        "dequantization": work.dequantized_bytes / (gpu.bandwidth * constants.dequantization_share),
        "elementwise": (
            constants.elementwise_traffic * work.kept_bytes
            + work.dropped_bytes
            + work.rounded_bytes
        )
        / gpu.bandwidth,
        "loss": work.logit_bytes / (gpu.bandwidth * LOSS_SHARE),
        "update": work.update_bytes / gpu.bandwidth,
        # copies to and from the host take memory bandwidth too
        "copies": (gathered + 2 * work.stashed_bytes) / gpu.bandwidth,
    }
    pause_s = work.pauses * constants.pause_s
    late_s = launch_seconds(work, constants, traffic) - sum(parts.values()) - pause_s
    parts["waiting_for_python"] = max(0.0, late_s)
    waiting = _waiting(work, gpu, constants, traffic, compute_s=sum(parts.values()))
    return parts | waiting | {"waiting_between_steps": pause_s}


def launch_seconds(work: Work, constants: Constants, traffic: Traffic) -> float:
    """Seconds of Python launching the kernels of a micro-batch; 0 for graphs."""
    if work.graphed:
        return 0.0
    sharded_s = constants.sharded_launch_s * (traffic != NO_TRAFFIC)
    own_s = constants.launch_s * (EIGHT_BIT_LAUNCH if work.eight_bits else 1)
    experts = 1 + (EXPERT_LAUNCH - 1) * work.expert_share
    rounding_s = ROUNDING_LAUNCH_S * work.rounding_passes
    return work.layer_passes * (own_s * experts + sharded_s) + rounding_s


def _waiting(
    work: Work, gpu: GpuModel, constants: Constants, traffic: Traffic, *, compute_s: float
) -> Parts:
    """What traffic takes longer than compute; activations leave in forward and return after."""
    of_all = HOST_MEMORY_BANDWIDTH / traffic.gpus_of_host
    host = min(gpu.host_bandwidth * constants.host_share, of_all)
    forward_s = work.forward_share * compute_s
    stash_s, both_hosted_s = (
        work.stashed_bytes / host,
        2 * work.hosted_layers * work.hosted_bytes / host,
    )
    late_s = max(0.0, traffic.beside_s - compute_s)
    if gpu.link in (PCIE_4, PCIE_5) and traffic.beside_s:  # one slot for all of it
        late_s = max(0.0, traffic.beside_s + 2 * stash_s + both_hosted_s - compute_s)
    alone_s = max(0.0, stash_s - forward_s) + max(0.0, stash_s - (compute_s - forward_s))
    alone_s += _late_layers(work, traffic, copy_s=work.hosted_bytes / host, compute_s=compute_s)
    return {
        "waiting_for_other_gpus": max(0.0, late_s - alone_s) + traffic.exposed_s,
        "waiting_for_the_host": alone_s + work.looked_up_bytes / constants.lookup_bandwidth,
    }


def _late_layers(work: Work, traffic: Traffic, *, copy_s: float, compute_s: float) -> float:
    """What layers from the host are late: each is brought while the layer before it computes."""
    needed_s = copy_s + traffic.gather_s
    before = (work.forward_share, 1 - work.forward_share)
    late = (max(0.0, needed_s - share * compute_s / work.layers) for share in before)
    return work.hosted_layers * sum(late)


def gpu_seconds(
    work: Work, gpu: GpuModel, *, constants: Constants = H200, traffic: Traffic = NO_TRAFFIC
) -> float:
    """Seconds of a micro-batch on a GPU."""
    return sum(gpu_parts(work, gpu, constants=constants, traffic=traffic).values())


def cpu_seconds(work: Work, *, flops: float) -> float:
    """Seconds of a micro-batch in one CPU process that makes so many FLOP/s."""
    return (work.product_flops + work.expert_flops + work.attention_flops) / flops


def estimate(
    parts: Parts | None,
    *,
    basis: str,
    num_gpus: int,
    tokens: int,
    accumulation_steps: int,
    num_steps: int,
    price_per_gpu_hour: float | None,
) -> Estimate:
    """Return the predicted time of a run. parts: of a micro-batch of `tokens` tokens, None where
    the speed is not known; num_gpus: 0 on the CPU. `cost` is None without a price or a time."""
    if parts is None:
        return Estimate(
            step_s=None,
            total_h=None,
            tokens_per_s_per_process=None,
            cost=None,
            parts_s={},
            basis=basis,
        )
    micro_s = sum(parts.values())
    step_s = micro_s * accumulation_steps
    total_h = step_s * num_steps / 3600
    gpu_hours = total_h * num_gpus
    return Estimate(
        step_s=step_s,
        total_h=total_h,
        tokens_per_s_per_process=tokens / micro_s,
        cost=gpu_hours * price_per_gpu_hour if gpu_hours and price_per_gpu_hour else None,
        parts_s=parts,
        basis=basis,
    )
