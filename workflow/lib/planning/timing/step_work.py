"""What one process does for one micro-batch, counted from shapes: FLOP, bytes that move, launches.

Nothing here knows how fast a GPU is; `step_time` makes seconds of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear, ModelShape
from workflow.lib.planning.model_sizes import (
    ROUNDED_BYTES,
    adapter_parameters,
    kept_elements,
    layer_parameters,
    norms,
    packed_bytes,
    saved_bytes,
    trainable_parameters,
)
from workflow.lib.settings.optimizers import OPTIMIZERS
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.compute_choice import COMPUTE_DTYPE, WIDEST_HEAD

# Of varlen's time for the same documents, without the cap: 1.90 and 1.48 ms, forward and backward
# of 2 x 3,072 tokens of Gemma 2 27B's attention on an H200.
FLEX_TIME = 1.3
# Of FlashAttention's time for as many matmuls, by our kernels for wider heads (they make the
# scores three times where it makes them twice, in tiles of 16 to 64 tokens).
WIDE_HEAD_TIME = 3.8
# Of a matmul of as many rows by one weight: so much longer takes one by experts. 20.8 ms for 9.9
# TFLOP of frozen weights in the widths of Qwen3-30B-A3B, 32,768 rows, on an H100, where dense
# matmuls reach 663 TFLOP/s (profiled, November 2026).
GROUPED_TIME = 1.4
# Elementwise work of a layer, of what a fused layer keeps (`model_sizes.kept_elements`): of a fused
# layer, and of one that is not, which keeps twice as much. 8 layers of 70B width on 2 x H200: 21 ms
# less fused, where unfused layers take 69 (profiled).
FUSED_TRAFFIC, UNFUSED_TRAFFIC = 0.6, 2.0
# Dropout's kernel reads and writes an adapter's input (2 passes over it, forward); backward does it
# again, and makes, reads and adds a gradient (5). Counted, not measured.
DROPPED_TRAFFIC = 3
# The same of a layer with experts: its matmuls read rows where they lie and add adapters and
# biases themselves, and one kernel each way computes what is between them. 12 layers of
# Qwen3-30B-A3B on an H100, all but the loss and the update: 18 and 14 ms with and without
# recomputation (profiled, November 2026).
EXPERT_TRAFFIC = 0.66
# And of a recurrent layer, whose own code computes much between its linears.
RECURRENT_TRAFFIC = 2.5
# Against bf16 matmuls, 4,096 rows of 70B and 8B widths on an H200, torch 2.11, November 2026: by a
# prototype of float8 (1,231 to 1,338 TFLOP/s for 659 to 734), and by torch's int8 matmul without
# scales (832 to 934). docs/time-model.md compares the engine's own.
FLOAT8_SPEED = 1.84
# Of a weight that is decoded: half a byte read, two written; one for a matmul in 8 bits.
PACKED_BYTES, DEQUANTIZED_BYTES, EIGHT_BIT_BYTES = 0.5, 2.5, 1.5
# Bytes that a logit moves in the loss, counted by the operations of `chunked_loss` in bf16: to fp32
# (6), log-softmax (8), the gradient of the targets' values (4), that of log-softmax (12), back to
# bf16 (6); soft-capping divides, takes tanh and multiplies (24), and again for the gradient (28).
LOGIT_BYTES, CAPPED_LOGIT_BYTES = 36, 88
# By kernels: read for log-sum-exp (2), read and replaced by the gradient (4).
FUSED_LOGIT_BYTES = 6
# Bytes that the update moves for a trained weight beside the optimizer's states, counted: its
# gradient's norm (4), clipping (8), the update's weight and gradient (12), the gradient set to zero
# (4), the cast to 16 bits (6).
UPDATE_BYTES = 34


@dataclass(frozen=True)
class Work:
    """A process's work for a micro-batch; `layer_passes`: forward, recomputation and backward."""

    product_flops: float  # without those of experts' frozen weights
    attention_flops: float
    dequantized_bytes: float
    kept_bytes: float
    """What autograd keeps of a layer, times passes of layers: elementwise work grows with it."""
    layer_passes: int
    forward_share: float  # of all passes
    logit_bytes: float = 0  # moved in the loss, besides the head's matmuls
    update_bytes: float = 0  # moved by the update; of a step, divided by its micro-batches
    pauses: float = 0
    """How often the GPU waits for the host to begin the next step: once a step, divided by its
    micro-batches; never if they are launched ahead."""
    dropped_bytes: float = 0  # moved for dropout's masked inputs, and the gradients of them
    expert_flops: float = 0
    """Of experts' frozen weights, as dense FLOP that take as long where each has many rows."""
    expert_weight_bytes: float = 0
    """Decoded weights that these matmuls read: what bounds them where rows are few."""
    expert_adapter_bytes: float = 0
    """Rows that the matmuls of experts' adapters read: what bounds them, not FLOP."""
    looked_up_bytes: int = 0  # embedding rows that come from host memory
    rounded_bytes: float = 0
    """Read and written to round activations after forward and to restore them for backward, and to
    round what is multiplied in 8 bits."""
    rounding_passes: int = 0
    """Forward and backward passes of layers that round activations for backward."""
    stashed_bytes: float = 0  # activations that go to host memory, and come back
    hosted_layers: int = 0
    """Layers whose packed weights come from the host for both passes, and one's bytes."""
    hosted_bytes: int = 0
    layers: int = 1
    eight_bits: bool = False  # frozen weights are multiplied in 8 bits
    expert_share: float = 0.0  # of all layers: those with experts
    graphed: bool = False  # launched as CUDA graphs


def micro_batch_work(
    shape: ModelShape, plan: StepPlan, *, trained_share: float, micro_batches: int = 1
) -> Work:
    """Count the work of a micro-batch of T tokens, of which `trained_share` (0 to 1) reach the
    loss; a step has `micro_batches`. DoRA multiplies every weight with A once a step, counted as if
    a step had one micro-batch."""
    t, layers = plan.tokens, shape.num_layers
    recomputed = plan.recomputed_layers(layers)
    layer_passes = (plan.forwards + 1) * layers + recomputed
    passes = layer_passes / layers
    logits = t * trained_share * shape.vocab_size
    normed = shape.quantized_weights if plan.dora else 0
    recomputed_share = recomputed / layers
    made = {"passes": passes, "recomputed": recomputed_share}
    rounding_passes = 2 * (layers - recomputed) * plan.rounds_activations
    return Work(
        product_flops=t * _frozen_flops(shape, plan, grouped=False, **made)
        + t * _adapter_flops(shape, plan, passes=passes)
        + 2 * (plan.forwards + 1) * logits * shape.hidden_size
        + 2 * plan.rank * normed,
        attention_flops=t * _attention_flops(shape, plan) * (passes - 1 + 2.5),
        dequantized_bytes=_decoded_bytes(shape, plan, _moved_to_decode, **made)
        + normed * DEQUANTIZED_BYTES,
        kept_bytes=layer_passes * _elementwise_bytes(shape, plan),
        layer_passes=layer_passes,
        forward_share=plan.forwards * layers / layer_passes,
        logit_bytes=logits * _logit_bytes(shape, plan),
        update_bytes=(UPDATE_BYTES + OPTIMIZERS[plan.optimizer].moved_bytes)
        * trainable_parameters(shape, plan)
        / (plan.shards * micro_batches),
        pauses=0 if _launched_ahead(plan) else 1 / micro_batches,
        dropped_bytes=layer_passes * _dropped_bytes(shape, plan),
        expert_flops=t * GROUPED_TIME * _frozen_flops(shape, plan, grouped=True, **made),
        expert_weight_bytes=_decoded_bytes(shape, plan, _read_by_experts, **made),
        expert_adapter_bytes=t * plan.compute_bytes * _adapter_rows(shape, plan, passes=passes),
        looked_up_bytes=plan.rows_from_host * shape.hidden_size * plan.compute_bytes,
        rounded_bytes=rounding_passes * _rounded_bytes(shape, plan)
        + t * _rounded_for_products(shape, plan, passes=passes),
        rounding_passes=rounding_passes,
        stashed_bytes=_stashed_bytes(shape, plan),
        hosted_layers=len(plan.layers(layers).weights_on_host),
        hosted_bytes=shape.largest(lambda layer: packed_bytes(layer.linears, plan)) // plan.shards,
        layers=layers,
        eight_bits=plan.matmul_dtype != COMPUTE_DTYPE,
        expert_share=shape.total(_has_experts) / layers,
        graphed=plan.graphed,
    )


def _logit_bytes(shape: ModelShape, plan: StepPlan) -> int:
    """Moved in the loss for a logit."""
    if plan.fused_loss and not plan.top_k:  # with a teacher there is no kernel
        return FUSED_LOGIT_BYTES
    return CAPPED_LOGIT_BYTES if shape.logit_softcap else LOGIT_BYTES


def _frozen_flops(
    shape: ModelShape, plan: StepPlan, *, grouped: bool, passes: float, recomputed: float
) -> float:
    """Of decoder layers' frozen weights, a token: each in forward, in recomputation less what that
    spares, and in backward (2 FLOP each), in 8 bits as so many in bf16 as take as long. grouped: of
    experts, of which a token uses top_k, and not of all else."""

    def used(layer: DecoderLayer, linears: Iterable[Linear]) -> int:
        return sum(
            x.num_weights // x.experts * layer.rows(x)
            for x in linears
            if (x.experts > 1) == grouped
        )

    spared = shape.total(lambda layer: used(layer, _not_recomputed(layer, plan)))
    weights = passes * shape.total(lambda layer: used(layer, layer.linears)) - recomputed * spared
    saved = 1 - 1 / FLOAT8_SPEED
    return 2 * weights * (1 - saved * _eight_bit_share(plan, passes=passes))


def _adapter_flops(shape: ModelShape, plan: StepPlan, *, passes: float) -> float:
    """Of decoder layers' adapters, a token: each weight twice in backward; no experts."""
    adapters = shape.total(
        lambda layer: (
            layer_parameters(layer, plan)
            - adapter_parameters((x for x in layer.linears if x.experts > 1), plan)
        )
    )
    return 2 * (passes + 1) * (adapters + adapter_parameters(shape.other_linears, plan))


def _decoded_bytes(
    shape: ModelShape,
    plan: StepPlan,
    bytes_of: Callable[[Linear, StepPlan, float], float],
    *,
    passes: float,
    recomputed: float,
) -> float:
    """Moved for all weights (all experts) in all passes; `bytes_of`: one weight, one pass."""

    def moved(linears: Iterable[Linear]) -> float:
        return sum(x.num_weights * bytes_of(x, plan, passes) for x in linears)

    counts = shape.counts.items()
    kinds = ((count, shape.kinds[kind]) for kind, count in counts)
    return sum(
        count * (passes * moved(layer.linears) - recomputed * moved(_not_recomputed(layer, plan)))
        for count, layer in kinds
    )


def _moved_to_decode(linear: Linear, plan: StepPlan, passes: float) -> float:
    """On average of the passes."""
    in_eight_bits = _eight_bit_share(plan, passes=passes)
    return DEQUANTIZED_BYTES - (DEQUANTIZED_BYTES - EIGHT_BIT_BYTES) * in_eight_bits


def _read_by_experts(linear: Linear, plan: StepPlan, passes: float) -> float:
    """What was written to decode it; 0 for all but experts."""
    return (linear.experts > 1) * (_moved_to_decode(linear, plan, passes) - PACKED_BYTES)


def _eight_bit_share(plan: StepPlan, *, passes: float) -> float:
    """Return the share of the passes whose matmuls are in float8; backward is one pass."""
    if plan.matmul_dtype == COMPUTE_DTYPE:
        return 0.0
    return {"both": passes, "forward": passes - 1, "backward": 1}[plan.matmul_passes] / passes


def _rounded_for_products(shape: ModelShape, plan: StepPlan, *, passes: float) -> float:
    """Bytes by token that are moved to round what frozen weights multiply in 8 bits: their inputs
    in every pass but backward, and the gradients of their values in it."""
    if plan.matmul_dtype == COMPUTE_DTYPE:
        return 0.0
    forward = (passes - 1) * (plan.matmul_passes != "backward")
    inputs = shape.total(lambda layer: _multiplied_elements(layer, plan, gradients=False))
    gradients = shape.total(lambda layer: _multiplied_elements(layer, plan, gradients=True))
    elements = forward * inputs + (plan.matmul_passes != "forward") * gradients
    return (plan.compute_bytes + 1) * elements


def _multiplied_elements(layer: DecoderLayer, plan: StepPlan, *, gradients: bool) -> int:
    """Elements by token of what a layer's frozen weights multiply. Linears of one module share
    their input, all but its last, which has its own."""
    chosen = layer.linears
    if gradients:
        return sum(layer.rows(x) * x.out_features // x.experts for x in chosen)
    last = {_module_of(x): x for x in chosen}
    shared = {(_module_of(x), x.in_features) for x in chosen if x is not last[_module_of(x)]}
    return sum(width for _, width in shared) + sum(
        layer.rows(x) * x.in_features for x in last.values()
    )


def _module_of(linear: Linear) -> str:
    return linear.path.rpartition(".")[0]


def _attention_flops(shape: ModelShape, plan: StepPlan) -> float:
    """Of a token in forward: 2 S (q + width of values) a layer, as a rule 4 S q; half of it with
    flash (causal). Backward takes 2.5 times that (FlashAttention-2, arXiv 2307.08691, sec. 4.1).
    Heads wider than FlashAttention's count as what they take."""
    causal = {"flash": 0.5, "flex": 0.5 * FLEX_TIME}.get(plan.attention_kind, 1.0)

    def width(layer: DecoderLayer) -> float:
        wide = plan.attention_kind == "flash" and layer.head_dim > WIDEST_HEAD
        return (WIDE_HEAD_TIME if wide else 1.0) * (layer.query_width + layer.value_width)

    widths = sum(count * width(shape.kinds[kind]) for kind, count in shape.counts.items())
    return 2 * plan.seq_len * causal * widths


def _elementwise_bytes(shape: ModelShape, plan: StepPlan) -> float:
    """Bytes that elementwise work of a layer grows with, on average; with eager attention also
    scores, and their softmax in fp32 and in the compute dtype."""
    fused = FUSED_TRAFFIC if plan.fused_layers else UNFUSED_TRAFFIC

    def touched(layer: DecoderLayer) -> float:
        factor = fused
        if layer.recurrent:
            factor = RECURRENT_TRAFFIC
        if _has_experts(layer):
            factor = EXPERT_TRAFFIC
        scores = plan.seq_len * layer.num_heads if plan.attention_kind == "eager" else 0
        c = plan.compute_bytes
        values = sum(x.out_features for x in layer.linears if x.name in plan.targets)
        kept = factor * kept_elements(layer, plan) + plan.dora * values
        return c * kept + (4 + c) * scores

    counts = shape.counts.items()
    total = sum(count * touched(shape.kinds[kind]) for kind, count in counts)
    return plan.tokens * total / shape.num_layers


def _launched_ahead(plan: StepPlan) -> bool:
    """Whether the next step's first micro-batch is launched before the host has read this one's
    loss: by graphs, where the device itself decides on the update."""
    return plan.graphed and OPTIMIZERS[plan.optimizer].device_decides


def _has_experts(layer: DecoderLayer) -> int:
    return int(any(x.experts > 1 for x in layer.linears))


def _adapted_stacks(layer: DecoderLayer, plan: StepPlan) -> list[Linear]:
    return [x for x in layer.linears if x.experts > 1 and x.name in plan.targets]


def _adapter_rows(shape: ModelShape, plan: StepPlan, *, passes: float) -> float:
    """Elements by token that the matmuls of experts' adapters read: inputs for x A^T in every pass
    but backward and for the gradient of A, gradients for that of x A^T and for that of B."""

    def elements(layer: DecoderLayer) -> float:
        stacks = _adapted_stacks(layer, plan)
        inputs = sum(layer.rows(x) * x.in_features for x in stacks)
        gradients = sum(layer.rows(x) * x.out_features // x.experts for x in stacks)
        return passes * inputs + 2 * gradients

    counts = shape.counts.items()
    return sum(count * elements(shape.kinds[kind]) for kind, count in counts)


def _not_recomputed(layer: DecoderLayer, plan: StepPlan) -> tuple[Linear, ...]:
    """The linear of a layer that recomputation stops before: the last one, unless its value is
    kept, by DoRA or by a norm behind it."""
    return () if plan.dora or norms(layer) > 2 else layer.linears[-1:]


def _dropped_bytes(shape: ModelShape, plan: StepPlan) -> float:
    """Bytes moved in a layer for dropout, the mean of its passes."""
    if not plan.dropout:
        return 0
    inputs = shape.total(
        lambda layer: sum(x.in_features for x in layer.linears if x.name in plan.targets)
    )
    return DROPPED_TRAFFIC * plan.compute_bytes * plan.tokens * inputs / shape.num_layers


def _rounded_bytes(shape: ModelShape, plan: StepPlan) -> float:
    """Moved to round a layer's activations, and again to restore them: each element in the compute
    type, and in 8 bits with its share of a scale. Counted, not measured."""
    elements = shape.total(lambda layer: kept_elements(layer, plan)) / shape.num_layers
    return plan.tokens * elements * (plan.compute_bytes + ROUNDED_BYTES)


def _stashed_bytes(shape: ModelShape, plan: StepPlan) -> float:
    """Inputs of recomputed layers, and what the others keep."""
    away = plan.layers(shape.num_layers).activations_on_host
    elements = sum(
        shape.hidden_size if plan.recomputes(x) else kept_elements(shape.layer(x), plan)
        for x in away
    )
    return plan.tokens * elements * saved_bytes(plan)
