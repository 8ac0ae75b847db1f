"""Seconds of a step from shapes and a table of GPUs: a roofline over the phases of a micro-batch.

A GPU's work is products + attention + dequantization + elementwise traffic, each at a share of what
the data sheet promises. Three things run beside it, and count only for what they take longer:
Python, which launches the kernels; traffic between GPUs; and activations on their way to the host
and back. On PCIe the last two share the slot. Constants come from measurements (`calibration`);
which ones, `machine_speed` decides.
Units: FLOP, bytes, seconds.
"""

from dataclasses import dataclass, replace

from workflow.lib.artifacts.preflight_record import Estimate
from workflow.lib.model.architecture.model_shape import DecoderLayer, ModelShape
from workflow.lib.planning.memory.offload_terms import hosted_slice, stashed_counts
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import (
    ROUNDED_BYTES,
    kept_activations,
    lora_parameters,
    rounded_elements,
    saved_activations,
)
from workflow.lib.planning.timing.gpu_traffic import NO_TRAFFIC, Traffic
from workflow.lib.system.compute_choice import COMPUTE_DTYPE, FLOAT8, INT8
from workflow.lib.system.gpu_models import PCIE_4, PCIE_5, GpuModel


@dataclass(frozen=True)
class Constants:
    """What data sheets do not say. All are above 0."""

    product_share: float
    """Of the data sheet's FLOP/s in matrix products, and in attention."""
    attention_share: float
    dequantization_share: float
    """Of the data sheet's memory bandwidth in dequantization."""
    elementwise_traffic: float
    """Bytes moved in elementwise work for each byte that autograd keeps and each pass."""
    launch_s: float
    """What Python takes to launch one pass of one layer, and what it takes more if the layer is
    sharded."""
    sharded_launch_s: float
    gather_traffic: float
    """Bytes of memory traffic, and of waiting counted as such, for each byte of gathered
    weights."""
    host_share: float
    """Of the data sheet of its PCIe slot that a GPU gets in large copies from and to page-locked
    memory."""
    lookup_bandwidth: float
    """Bytes/s at which the host brings embedding rows. The GPU waits for them."""


# Fitted by `calibration` to timings of 1 and 2 H200; docs/time-model.md says to which, and how
# well.
H200 = Constants(
    product_share=0.67,
    attention_share=0.375,
    dequantization_share=0.453,
    elementwise_traffic=9.0,
    launch_s=2.42e-3,
    sharded_launch_s=2.5e-3,
    gather_traffic=10.0,
    host_share=0.631,
    lookup_bandwidth=4.63e9,
)
# Of varlen's time for the same documents, without the cap: 1.90 and 1.48 ms, forward and backward
# of 2 x 3,072 tokens of Gemma 2 27B's attention on an H200.
FLEX_TIME = 1.3
# Of a product of as many rows by one weight: so much longer takes one grouped by experts. 690
# TFLOP/s against 376 to 472 in the widths of Qwen3-30B-A3B, 475 to 530 of gpt-oss-20b and 401 to
# 449 of GLM-4.5-Air; 32,768 rows, `_grouped_mm` of torch 2.11, one H200.
GROUPED_TIME = 1.5
# Of the elementwise work that the activations suggest which fused layers no longer keep: so much is
# saved, more than all of it, because what they keep is also read and written less often. 8 layers
# of 70B width on 2 x H200: 21 ms, where unfused layers take 69 (profiled).
FUSED_SHARE = 1.43
# Dropout's kernel reads and writes an adapter's input (2 passes over it, forward); backward does it
# again, and makes, reads and adds a gradient (5). Counted, not measured.
DROPPED_TRAFFIC = 3
# Of the elementwise work and of Python's time for a pass of a layer without experts: so much more
# takes one with them, which sorts, gathers, scales and sums the rows of its tokens. Fitted to 12
# layers of Qwen3-30B-A3B on an H200; docs/time-model.md compares others.
EXPERT_TRAFFIC = 2.5
EXPERT_LAUNCH = 2.0
# Against bf16 products, 4,096 rows of 70B and 8B widths on an H200, torch 2.11, November 2026: by a
# prototype of float8 (1,231 to 1,338 TFLOP/s for 659 to 734), and by torch's int8 product without
# scales (832 to 934). docs/time-model.md compares the engine's own.
EIGHT_BIT_SPEED = {FLOAT8: 1.84, INT8: 1.27}
# Of Python's time for a pass of a layer, of the same prototype: Llama 3 8B, 2 rows of 2,048, took
# 437 ms for 96 passes and 339 ms for 64.
EIGHT_BIT_LAUNCH = 2.0
# More of Python's time for a pass of a layer that rounds, or restores, its activations: six of a
# plain layer at 0.14 ms, and nine times one at 0.09 ms (torch 2.11, 4,096 rows, November 2026).
ROUNDING_LAUNCH_S = 0.83e-3
DEQUANTIZED_BYTES = 2.5  # of a weight: half a byte read, two written

# One process with one thread in fp32: 55 to 76 GFLOP/s, measured as docs/memory-model.md says.
CPU_FLOPS = 65e9
# In bfloat16 on a CPU that multiplies it itself: a step took 5.2 s in place of 9.4 in fp32, with
# the same losses (AVX512-BF16, AMD EPYC, torch 2.13, November 2026). One CPU; what others do
# without such products, nobody measured.
CPU_BFLOAT16_FLOPS = CPU_FLOPS * 9.4 / 5.2
# At which one token's pass reads the weights: SmolLM2-135M took 52 ms in fp32, and 89 ms with NF4
# layers, which are decoded first (one thread, torch 2.13, November 2026).
CPU_BANDWIDTH = 10e9


@dataclass(frozen=True)
class Work:
    """What one process does for one micro-batch; `layer_passes` counts forward, recomputation and
    backward of each layer.
    """

    product_flops: float
    attention_flops: float
    dequantized_bytes: float
    kept_bytes: float
    """What autograd keeps of a layer, for each pass of each layer: elementwise work grows with
    it."""
    layer_passes: int
    forward_share: float
    """Of all passes."""
    dropped_bytes: float = 0
    """Moved for dropout's masked inputs, and the gradients of them."""
    looked_up_bytes: int = 0
    """Embedding rows that come from host memory."""
    rounded_bytes: float = 0
    """Read and written to round activations after forward and to restore them for backward."""
    rounding_passes: int = 0
    """Forward and backward passes of layers for it."""
    stashed_bytes: float = 0
    """Activations that go to host memory, and come back."""
    hosted_layers: int = 0
    """Layers whose packed weights come from host memory for forward and again for backward, and the
    bytes of one of them."""
    hosted_bytes: int = 0
    layers: int = 1
    eight_bits: bool = False
    """Frozen weights are multiplied in 8 bits."""
    expert_share: float = 0.0
    """Of all layers: those with experts."""
    graphed: bool = False
    """Launched as CUDA graphs."""


def micro_batch_work(shape: ModelShape, setup: Setup, *, trained_share: float) -> Work:
    """Count the work of a micro-batch of T tokens, of which `trained_share` (0 to 1) reach the
    loss.

    A frozen weight is used in forward, in recomputation, and once in backward (2 FLOP a token
    each); an adapter's twice in backward. Of experts a token uses top_k, but all are decoded in
    each pass. DoRA multiplies every weight with A once a step, counted as if a step had one
    micro-batch. Attention: 2 S (q + width of values), as a rule 4 S q, a token and layer in
    forward, half of it with flash (causal), 2.5 times that in backward (FlashAttention-2, arXiv
    2307.08691, sec. 4.1).
    """
    t, layers = setup.tokens, shape.num_layers
    recomputed = setup.recomputed_layers(layers)
    layer_passes = 2 * layers + recomputed
    passes = layer_passes / layers
    spared = shape.total(lambda layer: _not_recomputed(layer, setup)) / layers
    used = passes * shape.quantized_weights - recomputed * spared
    idle = passes * (
        shape.total(_idle_weights) - (GROUPED_TIME - 1) * shape.total(_grouped_weights)
    )
    head = 4 * trained_share * shape.vocab_size * shape.hidden_size
    adapters = lora_parameters(shape, setup) - shape.total(lambda x: _idle_adapters(x, setup))
    normed = shape.quantized_weights if setup.dora else 0
    causal = {"flash": 0.5, "flex": 0.5 * FLEX_TIME}.get(setup.attention, 1.0)
    width = shape.total(lambda layer: layer.query_width + layer.value_width)
    forward = 2 * setup.seq_len * causal * width
    saved_bytes = _mean_saved(shape, setup)
    plain = _mean_saved(shape, replace(setup, fused_layers=False))
    # In int8 experts stay in the compute type.
    in_plain = passes * GROUPED_TIME * shape.total(_grouped_weights) * (setup.products == INT8)
    saved = _saved_share(setup, passes=passes) * (used - idle - in_plain)
    frozen = 2 * (used - idle - saved)
    expert_share = shape.total(_has_experts) / layers
    rounds = setup.saved_activations != COMPUTE_DTYPE
    rounding_passes = 2 * (layers - recomputed) * rounds
    return Work(
        product_flops=t * (frozen + 2 * (passes + 1) * adapters + head) + 2 * setup.rank * normed,
        attention_flops=t * forward * (passes - 1 + 2.5),
        dequantized_bytes=(used + normed) * DEQUANTIZED_BYTES,
        kept_bytes=layer_passes
        * (plain - FUSED_SHARE * (plain - saved_bytes))
        * (1 + (EXPERT_TRAFFIC - 1) * expert_share),
        dropped_bytes=layer_passes * _dropped_bytes(shape, setup),
        layer_passes=layer_passes,
        forward_share=layers / layer_passes,
        looked_up_bytes=t * shape.hidden_size * setup.compute_bytes * setup.offload_embedding,
        rounded_bytes=rounding_passes * _rounded_bytes(shape, setup),
        rounding_passes=rounding_passes,
        stashed_bytes=_stashed_bytes(shape, setup),
        hosted_layers=setup.offload_layers,
        hosted_bytes=shape.largest(lambda layer: hosted_slice(layer, setup)),
        layers=layers,
        eight_bits=setup.products != COMPUTE_DTYPE,
        expert_share=expert_share,
        graphed=setup.graphed,
    )


def _saved_share(setup: Setup, *, passes: float) -> float:
    """Return the share of the time of frozen products that 8 bits save; backward is one pass."""
    if setup.products == COMPUTE_DTYPE:
        return 0.0
    rounded = {"both": passes, "forward": passes - 1, "backward": 1}[setup.products_in]
    return rounded / passes * (1 - 1 / EIGHT_BIT_SPEED[setup.products])


def _has_experts(layer: DecoderLayer) -> int:
    return int(any(x.experts > 1 for x in layer.linears))


def _idle_weights(layer: DecoderLayer) -> int:
    """Weights of a layer that a token is not multiplied with."""
    return layer.num_weights - layer.used_weights


def _grouped_weights(layer: DecoderLayer) -> int:
    """Weights of experts that a token is multiplied with."""
    stacks = [x for x in layer.linears if x.experts > 1]
    return sum(x.num_weights // x.experts * layer.top_k for x in stacks)


def _idle_adapters(layer: DecoderLayer, setup: Setup) -> int:
    """The same of adapters, whose grouped products nobody has timed in a step."""
    return sum(
        (x.experts - layer.rows(x))
        * setup.rank_of(x.name)
        * (x.in_features + x.out_features // x.experts)
        for x in layer.linears
        if x.experts > 1 and x.name in setup.targets
    )


def _mean_saved(shape: ModelShape, setup: Setup) -> float:
    """What autograd keeps of a layer, on average, bytes."""
    return shape.total(lambda layer: saved_activations(layer, setup)) / shape.num_layers


def _not_recomputed(layer: DecoderLayer, setup: Setup) -> int:
    """Weights of a layer that recomputation stops before: a plain one's last linear's, if no norm
    follows and its value is not kept.
    """
    needed = setup.dora or layer.norms_after or not layer.plain
    return 0 if needed else layer.linears[-1].num_weights


def _dropped_bytes(shape: ModelShape, setup: Setup) -> float:
    """Bytes moved in a layer for dropout, the mean of its passes."""
    if not setup.dropout:
        return 0
    inputs = shape.total(
        lambda layer: sum(x.in_features for x in layer.linears if x.name in setup.targets)
    )
    return DROPPED_TRAFFIC * setup.compute_bytes * setup.tokens * inputs / shape.num_layers


def _rounded_bytes(shape: ModelShape, setup: Setup) -> float:
    """Moved to round a layer's activations, and again to restore them: each element in the compute
    type, and in 8 bits with its share of a scale. Counted, not measured.
    """
    elements = shape.total(lambda layer: rounded_elements(layer, setup)) / shape.num_layers
    return elements * (setup.compute_bytes + ROUNDED_BYTES)


def _stashed_bytes(shape: ModelShape, setup: Setup) -> float:
    inputs, whole = stashed_counts(shape, setup)
    layers = shape.num_layers
    saved_bytes = shape.total(lambda layer: kept_activations(layer, setup)) / layers
    return inputs * setup.compute_bytes * setup.tokens * shape.hidden_size + whole * saved_bytes


Parts = dict[str, float]
# Bytes/s that all GPUs of a host together copy to its memory, or from it: 8 x H200, each with 6 of
# 8 layers' activations of 70B width there, copied 19 GB/s each (November 2026, a virtual machine of
# 128 cores). A host's memory differs; nobody measured others.
HOST_MEMORY_BANDWIDTH = 150e9


def gpu_parts(
    work: Work, gpu: GpuModel, *, constants: Constants = H200, traffic: Traffic = NO_TRAFFIC
) -> Parts:
    """Seconds of a micro-batch on a GPU by what it does or waits for; their sum is the time."""
    gathered = constants.gather_traffic * traffic.gathered_bytes
    parts = {
        "products": work.product_flops / (gpu.flops * constants.product_share),
        "attention": work.attention_flops / (gpu.flops * constants.attention_share),
        "dequantization": work.dequantized_bytes / (gpu.bandwidth * constants.dequantization_share),
        "elementwise": (
            constants.elementwise_traffic * work.kept_bytes
            + work.dropped_bytes
            + work.rounded_bytes
        )
        / gpu.bandwidth,
        # copies to and from the host take memory bandwidth too
        "copies": (gathered + 2 * work.stashed_bytes) / gpu.bandwidth,
    }
    late_s = launch_seconds(work, constants, traffic) - sum(parts.values())
    parts["waiting_for_python"] = max(0.0, late_s)
    return parts | _waiting(work, gpu, constants, traffic, compute_s=sum(parts.values()))


def launch_seconds(work: Work, constants: Constants, traffic: Traffic) -> float:
    """What Python takes to launch the kernels of a micro-batch; nothing that counts if they are a
    graph.
    """
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
    """What traffic takes longer than the compute beside it. Activations leave in forward and come
    back after it.
    """
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
    """What layers from the host are late: each is copied and gathered while one layer before it
    computes.
    """
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
    return (work.product_flops + work.attention_flops) / flops


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
    """Return the predicted time of a run.

    parts: of a micro-batch of `tokens` tokens, None where the speed is not known; num_gpus: 0 on
    the CPU. `cost` is None without a price or a time.
    """
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
