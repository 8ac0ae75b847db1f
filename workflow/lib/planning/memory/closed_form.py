"""Bytes that one process holds while it fine-tunes, in closed form from shapes alone.

The one idea: a step is a handful of phases; each phase is a sum of named terms (`terms`); the
peak is the largest phase. What a term counts, and what was measured, stands in
`workflow/docs/memory-model.md`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workflow.lib.model.architecture.model_shape import DecoderLayer, ModelShape
from workflow.lib.planning.memory.loss_terms import exchanged_gradients, loss_terms
from workflow.lib.planning.memory.offload_terms import (
    gathered_slices,
    gathered_weights,
    layers_of_stash,
    offload_window,
    weights_of_last_layer,
)
from workflow.lib.planning.memory.terms import (
    Terms,
    dequantized_weight,
    fuses_feed_forward,
    kept_activations,
    kept_within_step,
    layer_tensors,
    layer_workspace,
    layers_on_device,
    mask_bytes,
    other_tensors,
    saved_activations,
    stored_terms,
    table_slice,
)
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.compute_choice import COMPUTE_DTYPE
from workflow.lib.system.units import GIB

# Outside the allocator: CUDA context and loaded kernels; with several processes NCCL too. Measured
# with the engine on 2 x H200, torch 2.11 (docs/memory-model.md): 0.755 and 1.577 GiB. Smaller GPUs
# have smaller contexts.
CONTEXT_BYTES = int(0.76 * GIB)
CONTEXT_AND_NCCL_BYTES = int(1.58 * GIB)
# What the allocator must be able to reserve beyond what is allocated at the peak: runs of the
# engine under a falling memory cap, 1 and 2 H200, torch 2.11. With expandable_segments:True, which
# `launch` sets, 2.5% was enough for all; with native segments 10% was, and with 6% two processes
# failed.
ALLOCATOR_SLACK = 0.03


@dataclass(frozen=True)
class Prediction:
    """Terms of every phase of a step, bytes per process."""

    phases: dict[str, Terms]

    @property
    def peak_phase(self) -> str:
        """Name of the phase with the most bytes."""
        return max(self.phases, key=self.phase_bytes.__getitem__)

    @property
    def phase_bytes(self) -> dict[str, int]:
        """Bytes of every phase."""
        return {name: sum(terms.values()) for name, terms in self.phases.items()}

    @property
    def peak_bytes(self) -> int:
        """Bytes of the peak phase."""
        return max(self.phase_bytes.values())


def predict(shape: ModelShape, setup: StepPlan) -> Prediction:
    """Return the terms of every phase of a step; terms of 0 bytes are left out."""
    stored = stored_terms(shape, setup)
    phases = {
        name: {term: size for term, size in (stored | terms).items() if size > 0}
        for name, terms in _phases(shape, setup).items()
    }
    return Prediction(phases=phases)


def _phases(shape: ModelShape, setup: StepPlan) -> dict[str, Terms]:
    """Return what each phase adds to the stored terms; docs/memory-model.md walks through them."""
    return _forward_phases(shape, setup) | _backward_phases(shape, setup)


def _forward_phases(shape: ModelShape, setup: StepPlan) -> dict[str, Terms]:
    unit, packed = _layer_unit(shape, setup), gathered_weights(shape, setup)
    through = _throughout(shape, setup)
    saved = _saved(shape, setup, num_layers=shape.num_layers)
    work = _largest_work(_forward_work(layer, shape, setup) for layer in shape.kinds)
    held = _held(shape, setup)
    hidden = _hidden(shape, setup)
    wide = _wide_rows(shape, setup)
    return {
        "look_up_embedding": through
        | {"gathered_layer": _largest_gathered(shape, setup), "hidden_states": 2 * hidden + wide},
        "gather_first_layer": through
        | {"gathered_layer": unit + packed, "gather_buffer": unit, "hidden_states": hidden},
        "forward_layer": through | _in_use(shape, setup) | {"gather_buffer": unit} | saved | work,
        # A unit's buffer is freed when the next one is gathered; after the last layer none is.
        "loss": through
        | (held or {"gathered_layer": weights_of_last_layer(shape, setup)})
        | saved
        | {"gather_buffer": unit}
        | loss_terms(shape, setup),
    }


def _backward_phases(shape: ModelShape, setup: StepPlan) -> dict[str, Terms]:
    """The first layer that backward visits has all inputs still there, the last one all gradients
    already.
    """
    unit, held = _layer_unit(shape, setup), _held(shape, setup)
    gradients = _all_gradients(shape, setup)
    saved = [_saved(shape, setup, num_layers=layers) for layers in (shape.num_layers, 1)]
    first = _with_recomputed(saved[0], shape, setup, layer=shape.num_layers - 1)
    last = _with_recomputed(saved[1], shape, setup, layer=0)
    work = _largest_work(_backward_work(layer, shape, setup) for layer in shape.kinds)
    of_head = setup.trains_head * table_slice(shape, setup, width=4)
    return {
        "backward_first_layer": {"module_gradients": of_head}
        | _throughout(shape, setup)
        | _in_use(shape, setup)
        | {"gather_buffer": 0 if held else unit}
        | work
        | first,
        "backward_last_layer": _throughout(shape, setup)
        | gradients
        | {"gathered_layer": unit + _largest_gathered(shape, setup)}  # nothing is left to prefetch
        | work
        | last,
        "embedding_gradient": _embedding_gradient(shape, setup) | gradients,
        "optimizer_step": gradients,
    }


def _embedding_gradient(shape: ModelShape, setup: StepPlan) -> Terms:
    """A trained embedding's, made when all layers are done: of the micro-batch's rows, which
    several processes exchange.
    """
    if not setup.trains_embedding:
        return {}
    return {
        "gathered_layer": _largest_gathered(shape, setup),
        "hidden_states": 2 * _hidden(shape, setup) + _wide_rows(shape, setup),
        "gathered_rows": exchanged_gradients(shape, setup),
        "new_module_gradients": setup.keeps_gradients * table_slice(shape, setup, width=4),
    }


def _wide_rows(shape: ModelShape, setup: StepPlan) -> int:
    """A trained embedding's rows in fp32, where one process looks them up itself."""
    alone = setup.trains_embedding and setup.slices == 1 and setup.compute_bytes < 4
    return 4 * setup.tokens * shape.hidden_size if alone else 0


def _layer_unit(shape: ModelShape, setup: StepPlan) -> int:
    """U: what FSDP2 gathers of one decoder layer, its adapters, norms and biases; its all-gather
    buffer is as large.
    """
    return shape.largest(lambda layer: _gathered(layer, setup))


def _gathered(layer: DecoderLayer, setup: StepPlan) -> int:
    gathered = layer_tensors(layer, setup).gathered
    return gathered["norms_and_biases"] + gathered["lora_weights"]


def _largest_gathered(shape: ModelShape, setup: StepPlan) -> int:
    """Packed weights of one layer, where any are gathered."""
    one = shape.largest(lambda layer: gathered_slices(layer, setup))
    return min(one, gathered_weights(shape, setup))


def _hidden(shape: ModelShape, setup: StepPlan) -> int:
    return setup.compute_bytes * setup.tokens * shape.hidden_size


def _gradients(shape: ModelShape, setup: StepPlan) -> int:
    of_layers = shape.total(lambda layer: layer_tensors(layer, setup).sharded["lora_weights"])
    return of_layers + other_tensors(shape, setup).sharded["lora_weights"]


def _throughout(shape: ModelShape, setup: StepPlan) -> Terms:
    """What lies there from the start of forward to the end of backward: gradients of earlier
    micro-batches, and what is made of adapters once a step.
    """
    earlier = _all_gradients(shape, setup) if setup.keeps_gradients else {}
    return kept_within_step(shape, setup) | earlier


def _all_gradients(shape: ModelShape, setup: StepPlan) -> Terms:
    of_modules = setup.trained_tables * table_slice(shape, setup, width=4)
    return {"lora_gradients": _gradients(shape, setup), "module_gradients": of_modules}


def _in_use(shape: ModelShape, setup: StepPlan) -> Terms:
    """What is gathered while a layer computes: all layers if they are kept, else this one and the
    packed weights of the next.
    """
    packed = gathered_weights(shape, setup)
    if held := _held(shape, setup):
        return held | {"gathered_layer": packed if setup.offload_layers else 0}
    return {"gathered_layer": _layer_unit(shape, setup) + packed}


def _held(shape: ModelShape, setup: StepPlan) -> Terms:
    """All layers gathered, where they are not freed after forward; packed weights that wait on the
    host are.
    """
    if setup.reshard_after_forward:
        return {}
    here = layers_on_device(shape, setup)
    packed = shape.total(lambda layer: gathered_slices(layer, setup), here)
    whole = shape.total(lambda layer: _gathered(layer, setup)) + packed
    return {"gathered_layers": whole if setup.shards > 1 else 0}


def _saved(shape: ModelShape, setup: StepPlan, *, num_layers: int) -> Terms:
    """What forward leaves on the device for the backward of `num_layers` layers."""
    away = [layer for layer in layers_of_stash(shape, setup) if layer < num_layers]
    here = range(num_layers) if not away else sorted({*range(num_layers)} - {*away})
    saved = _saved_by(here, shape, setup)
    window = offload_window(shape, setup)
    if window is None:
        return saved
    leaving = sum(_saved_by(away, shape, setup).values())
    return saved | {"offloaded_activations": min(window, leaving)}


def _saved_by(layers: Sequence[int], shape: ModelShape, setup: StepPlan) -> Terms:
    """What these layers keep: those that are recomputed their input alone."""
    whole = [] if setup.activation_checkpointing in (True, 1) else layers
    whole = [layer for layer in whole if not setup.recomputes(layer)]
    return {
        "layer_inputs": (len(layers) - len(whole)) * _hidden(shape, setup),
        "saved_activations": shape.total(lambda layer: kept_activations(layer, setup), whole),
    }


def _with_recomputed(saved: Terms, shape: ModelShape, setup: StepPlan, *, layer: int) -> Terms:
    """`saved`, and what backward has of `layer` besides: all activations if it has just recomputed
    them, else, of offloaded and of rounded ones, those of the feed-forward's node.

    As if it were of the kind that has most: so it is of another layer, if not of this one.
    """
    if setup.recomputes(layer):
        more = shape.largest(lambda layer: saved_activations(layer, setup))
    elif setup.saved_activations != COMPUTE_DTYPE or layer in layers_of_stash(shape, setup):
        row = setup.compute_bytes * setup.tokens
        more = row * shape.largest(lambda x: x.hidden_size + 2 * x.intermediate_size)
    else:
        return saved
    return saved | {"saved_activations": saved.get("saved_activations", 0) + more}


def _largest_work(of_kinds: Iterable[Terms]) -> Terms:
    """The terms of the kind of layer that needs most."""
    return max(of_kinds, key=lambda terms: sum(terms.values()))


def _forward_work(layer: DecoderLayer, shape: ModelShape, setup: StepPlan) -> Terms:
    """In the last layer, when most is kept. With recomputation: residual, norm output, its fp32
    copy, feed-forward.

    Without, these are kept and so counted.
    """
    mask = {"attention_mask": mask_bytes(shape, setup)}
    if setup.recomputes(shape.num_layers - 1):
        wide = 2 * setup.compute_bytes + 4
        return mask | layer_workspace(layer, setup, wide=3, hidden_bytes=wide)
    weight = dequantized_weight(layer, setup)
    return mask | {"layer_workspace": _hidden(shape, setup), "dequantized_weight": weight}


def _backward_work(layer: DecoderLayer, shape: ModelShape, setup: StepPlan) -> Terms:
    """Gradients of the layer's output, of the feed-forward, of the loss, and of the adapters before
    their reduction.

    A fused feed-forward makes all but the gradient of the product in place.
    """
    hidden = setup.compute_bytes
    work = layer_workspace(layer, setup, wide=2, hidden_bytes=hidden)
    if fuses_feed_forward(layer, setup) and "dequantized_weight" not in work:
        work = layer_workspace(layer, setup, wide=1, hidden_bytes=hidden)
        work |= {"dequantized_weight": dequantized_weight(layer, setup)}
    return work | {
        "attention_mask": mask_bytes(shape, setup),
        "hidden_states": _hidden(shape, setup),
        "gathered_gradients": layer_tensors(layer, setup).gradients,
    }
