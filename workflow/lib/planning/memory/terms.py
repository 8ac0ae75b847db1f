"""The terms of the memory model: what each kind of tensor takes on one process, from shapes alone.

Letters: P processes that share one copy of the model, L layers, h hidden, f feed-forward, V
vocabulary, q and k query and key-value width, a heads, T = B x S tokens of a micro-batch, r rank, c
bytes of the compute type. G of the P processes share embedding and head. How tensors are cut and
rounded, `layer_tensors` says. Which terms meet at one moment, `memory` says.
"""

import math
from collections.abc import Iterable

from workflow.lib.model.architecture.expert_slices import DECODED_BYTES
from workflow.lib.model.architecture.layer_choice import spread
from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear, ModelShape
from workflow.lib.model.architecture.routers import CORRECTION
from workflow.lib.planning.memory.layer_tensors import (
    LayerKind,
    LayerTensors,
    Tensor,
    layer_tensors_of,
    rounded,
    sharded_bytes,
)
from workflow.lib.settings.optimizers import OPTIMIZERS
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.compute_choice import COMPUTE_DTYPE, FLEX_BLOCK, FLOAT8
from workflow.lib.system.units import GIB, MIB

# Inside the allocator: cuBLAS workspace on Hopper, for the forward's thread and for autograd's (32
# MiB each; 8 MiB on older GPUs). Measured with the engine on 2 x H200, torch 2.11
# (docs/memory-model.md).
CUBLAS_BYTES = 64 * MIB
# Resident set of a process on the CPU besides the model, measured (docs/memory-model.md): 0.43 GiB
# after the imports and 0.6 to 0.7 after some steps.
CPU_PROCESS_BYTES = int(0.7 * GIB)
CODE_TABLES = (16 * 4, 256 * 4, 4)  # quant_map, nested_quant_map, nested_offset of every NF4 linear
ROUNDED_BYTES = 1 + 4 / 128  # of an activation in float8: with its share of a block's scale

Terms = dict[str, int]


def lora_parameters(shape: ModelShape, setup: StepPlan) -> int:
    """Elements of all A (r, in_features), B (out_features, r), magnitudes (out_features,), and
    routers that are trained.
    """

    def elements(layer: DecoderLayer) -> int:
        tensors = layer_tensors(layer, setup).by_term["lora_weights"]
        return sum(rows * width for rows, width in tensors) // 4

    others = other_tensors(shape, setup).by_term["lora_weights"]
    return shape.total(elements) + sum(rows * width for rows, width in others) // 4


def trainable_parameters(shape: ModelShape, setup: StepPlan) -> int:
    """Elements of all adapters and of the tables that are trained whole."""
    return (
        lora_parameters(shape, setup) + setup.trained_tables * shape.vocab_size * shape.hidden_size
    )


def _targets(layer: DecoderLayer, setup: StepPlan) -> list[Linear]:
    return [linear for linear in layer.linears if linear.name in setup.targets]


def layer_tensors(layer: DecoderLayer, setup: StepPlan) -> LayerTensors:
    """Return the tensors of a decoder layer."""
    others = [*((name, (length,)) for name, length in layer.vectors), *layer.tensors]
    masters = {name: shape for name, shape in others if _is_master(name, setup)}
    kept = [shape for name, shape in others if name not in masters]
    return _tensors_of(layer.linears, kept, setup, masters=tuple(masters.values()))


def other_tensors(shape: ModelShape, setup: StepPlan) -> LayerTensors:
    """Return the tensors of the decoder outside of its layers, without tables."""
    vectors = [(length,) for _, length in shape.other_vectors]
    return _tensors_of(shape.other_linears, vectors, setup)


def _tensors_of(
    linears: tuple[Linear, ...],
    others: Iterable[tuple[int, ...]],
    setup: StepPlan,
    *,
    masters: tuple[tuple[int, ...], ...] = (),
) -> LayerTensors:
    """Return the tensors of linears, of what else stays in the compute type, and of masters."""
    shapes = list(others)
    kind = LayerKind(
        linears=linears,
        vectors=tuple(shape[0] for shape in shapes if len(shape) == 1),
        tensors=tuple(shape for shape in shapes if len(shape) > 1),
        masters=masters,
        adapters=setup.adapters,
        dora=setup.dora,
        block_size=setup.block_size,
        double_quant=setup.double_quant,
        compute_bytes=setup.compute_bytes,
        processes=setup.shards,
    )
    return layer_tensors_of(kind)


def _is_master(name: str, setup: StepPlan) -> bool:
    """Whether a tensor of a layer belongs to a router that is trained."""
    of_router = name.startswith(tuple(f"{path}." for path in setup.routers))
    return of_router and not name.endswith(CORRECTION)


def stored_terms(shape: ModelShape, setup: StepPlan) -> Terms:
    """Return what lies in memory from the second step on, in every phase."""
    c = setup.compute_bytes
    head_dim_bytes = 2 * shape.largest(lambda layer: layer.head_dim) * c  # cosine and sine
    return _device_terms(setup) | {
        **_packed_terms(shape, setup),
        "nf4_tables": (shape.total(lambda x: len(x.linears)) + len(shape.other_linears))
        * sum(map(rounded, CODE_TABLES))
        + product_scales(shape, setup),
        "embedding_and_head": frozen_tables(shape, setup) * table_slice(shape, setup, width=c)
        + sharded_bytes(
            [(rows, width * c) for _, (rows, width) in shape.other_tables], processes=setup.slices
        ),
        "module_weights": setup.trained_tables * table_slice(shape, setup, width=4),
        "norms_and_biases": _sharded(shape, setup, "norms_and_biases"),
        "lora_weights": _sharded(shape, setup, "lora_weights"),
        "adam_moments": moment_bytes(shape, setup),
        "inputs": setup.tokens
        * (4 * 8 + head_dim_bytes)  # four int64 each: ids, positions, rows, targets
        + _layer_inputs(shape, setup),
    }


def _device_terms(setup: StepPlan) -> Terms:
    """What the device adds to every phase. cuBLAS has workspaces for each stream, and graphs are
    captured on one of their own.
    """
    if setup.device == "cpu":
        return {"process": CPU_PROCESS_BYTES}
    return {"cublas_workspace": CUBLAS_BYTES * (2 if setup.graphed else 1)}


def _layer_inputs(shape: ModelShape, setup: StepPlan) -> int:
    """Bytes of what is made of tokens for all layers at once: rows of other tables, and the outputs
    of other linears, kept by the norm behind them and by the layers.
    """
    widths = [width for _, (_, width) in shape.other_tables]
    widths += [2 * linear.out_features for linear in shape.other_linears]
    return setup.compute_bytes * setup.tokens * sum(widths)


def _sharded(
    shape: ModelShape, setup: StepPlan, term: str, layers: Iterable[int] | None = None
) -> int:
    """Bytes of a term on a process, of these layers (None: all) and of what is outside of them."""
    of_layers = shape.total(lambda layer: layer_tensors(layer, setup).sharded[term], layers)
    return of_layers + other_tensors(shape, setup).sharded[term]


def _packed_terms(shape: ModelShape, setup: StepPlan) -> Terms:
    """Packed weights and their scales on a process's device: of several processes each has a slice
    of both together. Layers whose weights wait on the host have none.
    """
    here = layers_on_device(shape, setup)
    apart = () if setup.processes > 1 else here
    terms = {term: _sharded(shape, setup, term, apart) for term in ("nf4_weights", "nf4_scales")}
    if setup.processes > 1:
        terms["nf4_weights"] += shape.total(lambda layer: packed_slice(layer, setup), here)
    return terms


def packed_slice(layer: DecoderLayer, setup: StepPlan) -> int:
    """Bytes of a layer's packed weights and scales that a process keeps (`packed_layers`)."""
    return layer_tensors(layer, setup).packed_slice


def hosted_layers(shape: ModelShape, setup: StepPlan) -> list[int]:
    """The decoder layers whose packed weights wait in host memory."""
    return spread(setup.offload_layers, shape.num_layers)


def layers_on_device(shape: ModelShape, setup: StepPlan) -> list[int] | None:
    """The decoder layers whose packed weights do not; None: all."""
    if not setup.offload_layers:
        return None
    hosted = {*hosted_layers(shape, setup)}
    return [number for number in range(shape.num_layers) if number not in hosted]


def frozen_tables(shape: ModelShape, setup: StepPlan) -> int:
    """How many of embedding and head are on the device and are not trained."""
    tables = 1 if shape.tied_embeddings or setup.offload_embedding else 2
    return tables - setup.trained_tables


def table_slice(shape: ModelShape, setup: StepPlan, *, width: int) -> int:
    """Bytes of a slice of embedding or head, of `width` bytes an element."""
    table = (shape.vocab_size, shape.hidden_size * width)
    return sharded_bytes([table], processes=setup.slices)


def moment_bytes(shape: ModelShape, setup: StepPlan) -> int:
    """Bytes of the optimizer's states of all that is trained on the device."""
    of_layers = shape.total(lambda layer: layer_moments(layer, setup))
    others = other_tensors(shape, setup).by_term["lora_weights"]
    beside = _states(others, setup, cuts=setup.shards, matrix=False)
    return of_layers + beside + module_moments(shape, setup)


def layer_moments(layer: DecoderLayer, setup: StepPlan) -> int:
    """Bytes of the states of a layer's adapters."""
    return _states(layer_tensors(layer, setup).by_term["lora_weights"], setup, cuts=setup.shards)


def module_moments(shape: ModelShape, setup: StepPlan) -> int:
    """Bytes of the states of the tables that are trained whole."""
    table = (shape.vocab_size, 4 * shape.hidden_size)
    return _states([table] * setup.trained_tables, setup, cuts=setup.slices, matrix=False)


def _states(
    tensors: Iterable[Tensor], setup: StepPlan, *, cuts: int, matrix: bool | None = None
) -> int:
    """Bytes of what the optimizer keeps of fp32 tensors; DoRA's magnitudes (a column) are no
    matrices.
    """
    kind, total = OPTIMIZERS[setup.optimizer], 0
    for rows, width in tensors:
        elements = math.ceil(rows / cuts) * width // 4
        of_matrix = width > 4 if matrix is None else matrix
        total += sum(map(rounded, kind.sizes(elements, matrix=of_matrix)))
    return total


def saved_activations(layer: DecoderLayer, setup: StepPlan) -> int:
    """Bytes that autograd keeps of a decoder layer (an upper bound: as if every linear had an
    adapter).

    Norms keep an fp32 copy of their input (4 T h each), fused ones the input itself. Linears keep
    their input, which q, k, v share and gate, up (2 c T h; none behind fused norms, which are made
    again), and the down projection's (c T f); attention q, k, v, output and
    log-sum-exp; the feed-forward gate, activation and up (3 c T f, or what the family's own was
    seen to keep), a fused one gate and up alone; adapters x A^T; DoRA the values, of which those of
    gate and up are kept anyway.
    """
    if not layer.plain:
        return _saved_of_any(layer, setup)
    t, c, f = setup.tokens, setup.compute_bytes, layer.intermediate_size
    q, k = layer.query_width, layer.key_width
    # a mask makes Transformers repeat the heads
    keys = k if setup.attention_kind in ("flash", "flex") else q
    norm = c if fuses_norms(layer, setup) else layer.norm_bytes
    saved_bytes = norm * layer.hidden_norms * t * layer.hidden_size
    saved_bytes += 2 * c * t * (q + keys) + 4 * t * layer.num_heads
    saved_bytes += norm * t * sum(layer.head_norms)
    saved_bytes -= 2 * c * t * f if fuses_feed_forward(layer, setup) else 0
    saved_bytes += layer.feed_forward_tensors * c * t * f
    saved_bytes += c * t * sum(setup.rank_of(x.name) for x in _targets(layer, setup))
    saved_bytes += _dora_values(layer, setup) + _linear_inputs(layer, setup)
    return saved_bytes + _saved_scores(layer, setup)


def kept_activations(layer: DecoderLayer, setup: StepPlan) -> int:
    """Bytes of it that wait for backward, rounded or not (`rounded_activations`)."""
    spared = setup.compute_bytes - ROUNDED_BYTES
    return saved_activations(layer, setup) - int(rounded_elements(layer, setup) * spared)


def rounded_elements(layer: DecoderLayer, setup: StepPlan) -> int:
    """How many numbers that autograd keeps of a layer are rounded until backward."""
    if setup.saved_activations == COMPUTE_DTYPE:
        return 0
    rounded_bytes = saved_activations(layer, setup) - _exact_activations(layer, setup)
    return rounded_bytes // setup.compute_bytes


def _exact_activations(layer: DecoderLayer, setup: StepPlan) -> int:
    """Bytes of queries, keys, log-sum-exp, scores, low-rank products, and norms' inputs in fp32;
    with a mask, of values too, which are repeated like the keys.
    """
    t, c = setup.tokens, setup.compute_bytes
    kernel = setup.attention_kind in ("flash", "flex")
    keys = layer.key_width if kernel else 2 * layer.query_width
    exact = c * t * (layer.query_width + keys) + 4 * t * layer.num_heads
    exact += c * t * sum(layer.rows(x) * setup.rank_of(x.name) for x in _targets(layer, setup))
    if layer.plain and not fuses_norms(layer, setup) and layer.norm_bytes > c:
        widths = layer.hidden_norms * layer.hidden_size + sum(layer.head_norms)
        exact += layer.norm_bytes * t * widths
    return exact + _saved_scores(layer, setup)


def _saved_of_any(layer: DecoderLayer, setup: StepPlan) -> int:
    """Bytes that autograd keeps of a layer that is not plain: what it was seen to keep in 16 bits,
    x A^T of each row that an adapter multiplies, what attention keeps besides queries, keys, values
    and output, and the logits of routers whose load is balanced. DoRA keeps values, and with
    dropout inputs, as of plain layers.
    """
    t, c, targets = setup.tokens, setup.compute_bytes, _targets(layer, setup)
    saved_bytes = t * layer.kept_bytes * c // 2 + 4 * t * layer.num_heads
    if setup.balances_routers and layer.top_k:
        saved_bytes += c * t * max(x.experts for x in layer.linears)
    saved_bytes += c * t * sum(layer.rows(x) * setup.rank_of(x.name) for x in targets)
    if setup.attention_kind in ("sdpa", "eager"):  # a mask makes Transformers repeat the heads
        repeated = layer.num_heads - layer.num_kv_heads
        saved_bytes += c * t * repeated * (layer.head_dim + layer.value_head)
    if setup.dropout and setup.dora:
        saved_bytes += c * t * sum(layer.rows(x) * x.in_features for x in targets)
    return saved_bytes + _dora_values(layer, setup) + _saved_scores(layer, setup)


def fuses_norms(layer: DecoderLayer, setup: StepPlan) -> bool:
    """Whether all norms are `fused_norm.FusedNorm`."""
    return setup.fused_layers and layer.fused_norms


def _dora_values(layer: DecoderLayer, setup: StepPlan) -> int:
    """Values that DoRA keeps for the gradients of its magnitudes, beside those that what follows
    keeps. With dropout a sum follows, which keeps nothing.
    """
    if not setup.dora:
        return 0
    known = () if setup.dropout or not layer.plain else layer.feed_forward[:-1]
    kept = [x.out_features for x in _targets(layer, setup) if x not in known]
    return setup.compute_bytes * setup.tokens * sum(kept)


def fuses_feed_forward(layer: DecoderLayer, setup: StepPlan) -> bool:
    """Whether gate, up and down are one node (`fused_feed_forward.FusedFeedForward`): all with an
    adapter, which is not DoRA with dropout.
    """
    names = {linear.name for linear in layer.feed_forward}
    alone = setup.dropout and setup.dora
    adapted = setup.fused_layers and not alone and names <= set(setup.targets)
    return layer.fused_feed_forward and adapted


def _linear_inputs(layer: DecoderLayer, setup: StepPlan) -> int:
    """Inputs of linears: none of those behind fused norms, which are made again; DoRA with dropout
    keeps each one's own.
    """
    row = setup.compute_bytes * setup.tokens
    alone = setup.dropout and setup.dora
    normed = fuses_norms(layer, setup) and layer.norms_before and not alone
    shared = (0 if normed else 2 * layer.hidden_size) + layer.intermediate_size
    if alone:
        shared = max(shared, sum(x.in_features for x in _targets(layer, setup)))
    return row * shared


def _saved_scores(layer: DecoderLayer, setup: StepPlan) -> int:
    """What grows with S x S: eager attention keeps its softmax in fp32 and in the compute type, and
    the tanh that soft-caps scores; sdpa a mask.
    """
    square = setup.micro_batch_size * setup.seq_len**2
    c = setup.compute_bytes
    a_score = (4 if c == 4 else 4 + c) + (c if layer.attention_softcap else 0)
    scores = {"sdpa": c * square, "eager": a_score * square * layer.num_heads}
    return scores.get(setup.attention_kind, 0)


def mask_bytes(shape: ModelShape, setup: StepPlan) -> int:
    """Masks of packed rows, made once a forward: boolean for sdpa (its copy in the compute type:
    `_saved_scores`), in the compute type for eager; for flex the first key of each query, once more
    in whole blocks, and four tables of pairs of blocks (`flex_masks`), int32 all.
    """
    blocks = math.ceil(setup.seq_len / FLEX_BLOCK)
    row = {
        "flash": 0,
        "flex": 4 * (setup.seq_len + FLEX_BLOCK * blocks + 4 * (blocks + 1) * blocks),
        "sdpa": setup.seq_len**2,
        "eager": setup.compute_bytes * setup.seq_len**2,
    }[setup.attention_kind]
    return shape.attention_masks * setup.micro_batch_size * row


def decoded_linear(linear: Linear, setup: StepPlan, *, num_rows: int) -> int:
    """A weight as its product with `num_rows` rows uses it: in the compute type, of a stack of
    experts as much as is decoded at a time.

    In float8 with what is rounded beside it (a byte an element, a scale of 4 for 128), and a
    gradient that is added afterwards: an upper bound, of forward and backward.
    """
    c = setup.compute_bytes
    plain = c * linear.num_weights
    if linear.experts > 1:
        rows = num_rows * (max(linear.in_features, linear.out_features // linear.experts) + 4)
        return min(plain, DECODED_BYTES) + (rows if setup.matmul_dtype == FLOAT8 else 0)
    if setup.matmul_dtype == COMPUTE_DTYPE:
        return plain
    widest = max(linear.in_features, linear.out_features)
    rows = num_rows * (widest + 4 * math.ceil(widest / 128))
    return max(plain, linear.num_weights + rows + c * num_rows * linear.in_features)


def product_scales(shape: ModelShape, setup: StepPlan) -> int:
    """Scales of the rows of all weights that are multiplied in float8, and of the experts; every
    process has all.
    """
    if setup.matmul_dtype == COMPUTE_DTYPE:
        return 0

    def scales(linear: Linear) -> int:
        if linear.experts > 1:
            return rounded(4 * linear.experts)
        return rounded(4 * linear.out_features)

    return shape.total(lambda layer: sum(map(scales, layer.linears)))


def dequantized_weight(layer: DecoderLayer, setup: StepPlan) -> int:
    """The largest linear in the compute type, and its absmax in fp32; of a stack of experts as much
    as is decoded at a time.
    """

    def decoded(linear: Linear) -> int:
        absmax = 4 * math.ceil(linear.num_weights / setup.block_size) if setup.double_quant else 0
        num_rows = setup.tokens * layer.rows(linear)
        return decoded_linear(linear, setup, num_rows=num_rows) + absmax

    return max(map(decoded, layer.linears))


def layer_workspace(layer: DecoderLayer, setup: StepPlan, *, wide: int, hidden_bytes: int) -> Terms:
    """Temporaries of a layer: T x h ones, and either `wide` T x f ones, or one fewer and a
    dequantized weight.

    Eager attention's S x S temporaries (8 bytes a score) take the place of the T x f ones if they
    are more.
    """
    c, t = setup.compute_bytes, setup.tokens
    row = c * t * layer.intermediate_size
    weight = dequantized_weight(layer, setup)
    product = {"layer_workspace": (wide - 1) * row, "dequantized_weight": weight}
    scores = 8 * setup.micro_batch_size * setup.seq_len**2 * layer.num_heads
    feed_forward = {"layer_workspace": wide * row} if row > weight else product
    heavy = setup.attention_kind == "eager" and scores > sum(feed_forward.values())
    work = {"layer_workspace": scores} if heavy else feed_forward
    extra = hidden_bytes * t * layer.hidden_size + _adapter_workspace(layer, setup)
    return work | {"layer_workspace": work["layer_workspace"] + extra}


def _adapter_workspace(layer: DecoderLayer, setup: StepPlan) -> int:
    """Dropout makes an adapter's input, and a part of its gradient, by themselves; DoRA scales a
    gradient.
    """
    c, t, targets = setup.compute_bytes, setup.tokens, _targets(layer, setup)
    dropped = max((x.in_features for x in targets), default=0) if setup.dropout else 0
    scaled = max((x.out_features for x in targets), default=0) if setup.dora else 0
    return c * t * (dropped + scaled)


def kept_within_step(shape: ModelShape, setup: StepPlan) -> Terms:
    """What is made once a step of adapters that do not change in it (`adapter_state`): casts, in
    one process alone, and DoRA's row norms.
    """
    c, alone = setup.compute_bytes, setup.processes == 1

    def elements(layer: DecoderLayer) -> int:
        tensors = layer_tensors(layer, setup).by_term["lora_weights"]
        magnitudes = sum(x.out_features for x in _targets(layer, setup)) if setup.dora else 0
        return sum(rows * width for rows, width in tensors) // 4 - magnitudes

    def norms(layer: DecoderLayer) -> int:
        return sum(rounded(4 * x.out_features) for x in _targets(layer, setup))

    return {
        "adapter_casts": c * shape.total(elements) if alone and c < 4 else 0,
        "row_norms": shape.total(norms) if setup.dora else 0,
    }
