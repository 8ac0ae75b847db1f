"""Sizes from a model's shape: frozen weights, adapters, and roughly a layer's activations, for
time, disk and traffic; memory is recorded. And the cost of a calibration of the base, and whether
`quantize.method: auto` calibrates."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from workflow.lib.model.architecture.kept_linears import kept_linears
from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear, ModelShape
from workflow.lib.model.architecture.routers import CORRECTION
from workflow.lib.step_plan.plan import StepPlan

NESTED_BLOCK_SIZE = 256  # bitsandbytes' block of the second quantization (functional.quantize_4bit)


def layer_bytes(shape: ModelShape, plan: StepPlan, *, kept_bytes: int | None = None) -> list[int]:
    """Return `packed_bytes` of each decoder layer."""
    return [
        packed_bytes(
            shape.layer(number).linears,
            plan,
            prefix=f"{shape.layers}.{number}.",
            kept_bytes=kept_bytes,
        )
        for number in range(shape.num_layers)
    ]


def packed_bytes(
    linears: Iterable[Linear], plan: StepPlan, *, prefix: str = "", kept_bytes: int | None = None
) -> int:
    """Bytes of frozen weights: NF4 with scales, fp32 by block, or 8 bits by block and fp32 by 256;
    weights in 16 bits. prefix: of their paths; kept_bytes: of a weight in 16 bits, None: in the
    compute dtype."""
    paths = {f"{prefix}{linear.path}": linear for linear in linears}
    kept = kept_linears(plan.kept, paths) if plan.kept else ()
    total = 0
    for path, linear in paths.items():
        if path in kept:
            total += (kept_bytes or plan.compute_bytes) * linear.num_weights
            continue
        blocks = math.ceil(linear.num_weights / plan.block_size)
        nested = blocks + 4 * math.ceil(blocks / NESTED_BLOCK_SIZE)
        total += math.ceil(linear.num_weights / 2) + (nested if plan.double_quant else 4 * blocks)
    return total


def weights_by_path(shape: ModelShape) -> dict[str, int]:
    """Return the weights of every linear and stack of experts, by its path in the model."""
    return {path: linear.num_weights for path, linear in shape.linears_by_path().items()}


def adapter_parameters(linears: Iterable[Linear], plan: StepPlan) -> int:
    """Elements of A, of B and, with DoRA, of the magnitudes of all targets among the linears."""
    total = 0
    for linear in linears:
        if linear.name in plan.targets:
            sizes = map(math.prod, linear.adapter_shapes)
            total += plan.rank_of(linear.name) * sum(sizes) + plan.dora * linear.out_features
    return total


def trained_router_parameters(layer: DecoderLayer, plan: StepPlan) -> int:
    """Elements of a layer's routers that are trained whole."""
    tensors = [*((name, (length,)) for name, length in layer.vectors), *layer.tensors]
    routers = tuple(f"{path}." for path in plan.routers)
    return sum(
        math.prod(size)
        for name, size in tensors
        if name.startswith(routers) and not name.endswith(CORRECTION)
    )


def trainable_parameters(shape: ModelShape, plan: StepPlan) -> int:
    """Elements of all trained tensors: adapters, and routers and tables that are trained whole."""
    adapters = shape.total(lambda layer: adapter_parameters(layer.linears, plan))
    routers = shape.total(lambda layer: trained_router_parameters(layer, plan))
    tables = plan.trained_tables * shape.vocab_size * shape.hidden_size
    return adapters + adapter_parameters(shape.other_linears, plan) + routers + tables


def kept_elements(layer: DecoderLayer, plan: StepPlan) -> int:
    """Estimated elements per token that autograd keeps: values of linears, attention, norms."""
    values = sum(layer.rows(x) * x.out_features // x.experts for x in layer.linears)
    return values + layer.value_width + max(0, norms(layer) - 2) * layer.hidden_size


def norms(layer: DecoderLayer) -> int:
    """How many norms over the hidden size a layer has; above two, one follows the MLP."""
    return sum(
        name.endswith(".weight") and length == layer.hidden_size for name, length in layer.vectors
    )


def offload_window(shape: ModelShape, plan: StepPlan) -> int | None:
    """Bytes of offloaded activations on the device at a time, or None: two inputs of layers if all
    layers are recomputed (one with tiles: it is copied in a small share of a layer's time), else
    roughly a layer's activations."""
    offloaded = plan.layers(shape.num_layers).activations_on_host
    if not offloaded:
        return None
    if all(map(plan.recomputes, offloaded)):
        elements = (1 if plan.tile_tokens else 2) * shape.hidden_size
    else:
        elements = shape.largest(lambda layer: kept_elements(layer, plan))
    return int(plan.tokens * elements * plan.compute_bytes)


Method = Literal["absmax", "calibrated", "none"]
Shape = tuple[int, ...]

# On an H200, from layers of Llama 3 8B and 70B, Qwen3-30B-A3B and gpt-oss-20b: within 18% of each
# (docs/results.md). Includes forward passes, factorizations and measurements.
COLUMN_S = 10e-6
WEIGHT_S = 7e-9
AFFORDABLE_MIN = 60


def rounding_seconds(shapes: Sequence[Shape]) -> float:
    """Return the seconds of a calibration on one H200: shapes (out, in), or (experts, out, in)."""
    columns = sum(math.prod(shape[:-2]) * shape[-1] for shape in shapes)
    return COLUMN_S * columns + WEIGHT_S * sum(map(math.prod, shapes))


def chosen_method(
    method: Method | Literal["auto"], shapes: Sequence[Shape]
) -> tuple[Method, str | None]:
    """Return the quantization method of such weights, with the reason for `auto`: by the model
    alone, never by the machine, as a run that is repeated elsewhere needs the same base."""
    if method != "auto":
        return method, None
    minutes = rounding_seconds(shapes) / 60
    chosen: Method = "calibrated" if minutes <= AFFORDABLE_MIN else "absmax"
    bound = "at most" if chosen == "calibrated" else "more than"
    return chosen, (
        f"quantize.method: auto; calibrating {sum(map(math.prod, shapes)):,} weights takes about "
        f"{minutes:.3g} minutes on one H200, {bound} the {AFFORDABLE_MIN} that auto spends"
    )
