"""Seconds of a step from shapes and a table of GPUs: a roofline whose constants were measured on one kind of GPU.

A micro-batch costs products + attention + dequantization + elementwise traffic, each at a share of what
the data sheet promises, or the time that the host takes to launch the kernels, whichever is more.
The constants come from 2 x H200; for other GPUs they are assumed, not measured, so this is an
estimate for planning and no more. Traffic between GPUs is taken as hidden behind compute (on PCIe
it may not be). A GPU that the table does not know has no estimate. Units: FLOP, bytes, seconds.
"""

from dataclasses import dataclass
from typing import Any

from workflow.lib.gpus import BY_NAME, GpuModel
from workflow.lib.memory_terms import Setup, lora_parameters, saved_activations
from workflow.lib.shapes import ModelShape

# A profile of 8 layers of 70B width, T = 2 x 2048, 2 x H200, torch 2.11: products at 734 of 989
# TFLOP/s; dequantization of 2.5 bytes a weight at 1.9 of 4.8 TB/s; attention.
PRODUCT_SHARE = 0.74
ATTENTION_SHARE = 0.42
DEQUANTIZATION_SHARE = 0.40
# Fitted to 31 timings of the engine on 1 and 2 H200 (tests/measured_h200.jsonl): bytes of elementwise traffic for
# each byte that autograd keeps and each pass, at the data sheet's bandwidth; and what Python takes
# to launch one pass of one layer, which decides below about 2,000 tokens.
ELEMENTWISE_TRAFFIC = 15.0
LAUNCH_S = 3.3e-3
# Embedding rows from a mapped file: one thread copied 64 MiB in 15.5 ms (8,192 x bf16, 4,096 random rows, 2-core VM,
# November 2026). The GPU waits for it.
LOOKUP_BANDWIDTH = 4.3e9

# One process with one thread in fp32: 55 to 76 GFLOP/s, measured as docs/memory-model.md says.
CPU_FLOPS = 65e9


@dataclass(frozen=True)
class Work:
    """What one process does for one micro-batch; `layer_passes` counts forward, recomputation and backward of each layer."""

    product_flops: float
    attention_flops: float
    dequantized_bytes: float
    elementwise_bytes: float
    layer_passes: int
    looked_up_bytes: int = 0
    """Embedding rows that come from host memory."""


def micro_batch_work(shape: ModelShape, setup: Setup, *, trained_share: float) -> Work:
    """Count the work of a micro-batch of T tokens, of which `trained_share` (0 to 1) reach the loss.

    A frozen weight is used in forward, in recomputation, and once in backward (2 FLOP a token each);
    an adapter's twice in backward. The down projection counts as recomputed, though where no norm follows it is not. Attention: 4 S q a token and layer in forward, half of it with flash
    (causal), 2.5 times that in backward (FlashAttention-2, arXiv 2307.08691, sec. 4.1).
    """
    t = setup.tokens
    layer_passes = 2 * shape.num_layers + setup.recomputed_layers(shape.num_layers)
    passes = layer_passes / shape.num_layers
    adapters = lora_parameters(shape, setup)
    head = 4 * trained_share * shape.vocab_size * shape.hidden_size
    causal = 0.5 if setup.attention == "flash" else 1.0
    forward = 4 * setup.seq_len * shape.num_heads * shape.head_dim * causal * shape.num_layers
    return Work(
        product_flops=t
        * (2 * passes * shape.quantized_weights + 2 * (passes + 1) * adapters + head),
        attention_flops=t * forward * (passes - 1 + 2.5),
        dequantized_bytes=passes * shape.quantized_weights * 2.5,
        elementwise_bytes=ELEMENTWISE_TRAFFIC
        * passes
        * shape.num_layers
        * saved_activations(shape, setup),
        layer_passes=layer_passes,
        looked_up_bytes=t * shape.hidden_size * setup.compute_bytes * setup.offload_embedding,
    )


def gpu_seconds(work: Work, gpu: GpuModel) -> float:
    """Seconds of a micro-batch on a GPU."""
    busy = work.product_flops / (gpu.flops * PRODUCT_SHARE)
    busy += work.attention_flops / (gpu.flops * ATTENTION_SHARE)
    busy += work.dequantized_bytes / (gpu.bandwidth * DEQUANTIZATION_SHARE)
    busy += work.elementwise_bytes / gpu.bandwidth
    looked_up = work.looked_up_bytes / LOOKUP_BANDWIDTH
    return looked_up + max(busy, work.layer_passes * LAUNCH_S)


def cpu_seconds(work: Work) -> float:
    """Seconds of a micro-batch in one CPU process."""
    return (work.product_flops + work.attention_flops) / CPU_FLOPS


def estimate(
    work: Work,
    *,
    gpu_names: tuple[str, ...],
    tokens: int,
    accumulation_steps: int,
    num_steps: int,
    price_per_gpu_hour: float | None,
) -> dict[str, Any]:
    """Return the `time` entry of preflight.json.

    gpu_names: of the GPUs used, empty on the CPU; tokens: T. The slowest GPU decides; if one is
    unknown, the times are None and `basis` says so. `cost` is None without a price or a time.
    """
    unknown = sorted(set(gpu_names) - BY_NAME.keys())
    if unknown:
        basis = f"unknown: no speed is recorded for {', '.join(unknown)}"
        times = dict.fromkeys(("step_s", "total_h", "tokens_per_s_per_process", "cost"))
        return {**times, "basis": basis}
    if gpu_names:
        micro_s = max(gpu_seconds(work, BY_NAME[name]) for name in gpu_names)
        basis = f"uncalibrated roofline for {', '.join(sorted(set(gpu_names)))}; constants measured on H200"
    else:
        micro_s = cpu_seconds(work)
        basis = f"rough: {CPU_FLOPS / 1e9:.0f} GFLOP/s per CPU process, measured on one machine"
    step_s = micro_s * accumulation_steps
    total_h = step_s * num_steps / 3600
    gpu_hours = total_h * len(gpu_names)
    return {
        "step_s": step_s,
        "total_h": total_h,
        "tokens_per_s_per_process": tokens / micro_s,
        "cost": gpu_hours * price_per_gpu_hour if gpu_hours and price_per_gpu_hour else None,
        "basis": basis,
    }
