"""A recorder for tests of the search: peaks and work that grow as those of the engine do, made up
from shapes. Nothing needs torch."""

import math
from collections.abc import Callable, Sequence

from workflow.lib.model.architecture.kept_linears import kept_linears
from workflow.lib.model.architecture.layer_choice import activation_offload_layers, spread
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning import work
from workflow.lib.planning.memory.allocation_tape import HOST, Tape
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.model_sizes import (
    kept_elements,
    layer_bytes,
    offload_window,
    packed_bytes,
    trainable_parameters,
    weights_by_path,
)
from workflow.lib.planning.work import NOTHING, Amount, Work
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.units import MIB


class MadeUpMemory:
    """Knows what it was asked to record itself (`asked`); of that everything takes `share` times as
    much, by the number of the recording."""

    def __init__(self, shape: ModelShape, share: Callable[[int], float] = lambda _: 1.0) -> None:
        self.asked = []
        self._shape, self._share = shape, share

    def peaks(self, plans: Sequence[StepPlan]) -> list[Peaks]:
        return [replay(self._tape(plan, 1.0)).peaks for plan in plans]

    def tape(self, plan: StepPlan) -> Tape:
        self.asked.append(plan)
        return self._tape(plan, self._share(len(self.asked) - 1))

    def _tape(self, plan: StepPlan, share: float) -> Tape:
        tape = Tape()
        tape.phase("forward")
        for term, size in self._stored(plan).items():
            tape.new(share * size, term)
        for size in self._on_host(plan):
            tape.new(size, "offloaded_activations", HOST)
        tape.phase("backward")
        saved = [tape.new(share * n, term) for term, n in self._activations(plan).items()]
        tape.free(tape.new(share * self._workspace(plan), "layer_workspace"), *saved)
        tape.phase("optimizer_step")
        tape.free(tape.new(MIB, "layer_workspace"))
        tape.work = made_up_work(self._shape, plan)
        return tape

    def _stored(self, plan: StepPlan) -> dict[str, int]:
        shape, trained = self._shape, trainable_parameters(self._shape, plan)
        tables = 2 - (shape.tied_embeddings or plan.offload_embedding) - plan.trained_tables
        table = shape.vocab_size * shape.hidden_size // plan.slices
        hosted = {*spread(plan.offload_layers, shape.num_layers)}
        here = [size for x, size in enumerate(layer_bytes(shape, plan)) if x not in hosted]
        return {
            "nf4_weights": sum(here) // plan.shards,
            "embedding_and_head": tables * plan.compute_bytes * table,
            "lora_weights": 4 * trained // plan.shards,
            "lora_gradients": 4 * trained // plan.shards,
            "adam_moments": (2 if plan.optimizer.endswith("8bit") else 8) * trained // plan.shards,
            "decoded_weights": self._decoded(plan),
            "cublas_workspace": 64 * MIB,
        }

    def _decoded(self, plan: StepPlan) -> int:
        weights = sum(x.num_weights for x in self._shape.layer(0).linears)
        return plan.compute_bytes * plan.keep_decoded * weights

    def _kept(self, plan: StepPlan, layer: int) -> int:
        values = kept_elements(self._shape.layer(layer), plan) + plan.dropout * 10**4
        elements = self._shape.hidden_size if plan.recomputes(layer) else values
        return int(plan.compute_bytes * plan.tokens * elements)

    def _away(self, plan: StepPlan) -> list[int]:
        return activation_offload_layers(
            plan.offload_activations,
            recomputation=plan.activation_checkpointing,
            num_layers=self._shape.num_layers,
        )

    def _activations(self, plan: StepPlan) -> dict[str, int]:
        away = {*self._away(plan)}
        here = [x for x in range(self._shape.num_layers) if x not in away]
        return {
            "saved_activations": sum(self._kept(plan, layer) for layer in here),
            "offloaded_activations": offload_window(self._shape, plan) or 0,
        }

    def _workspace(self, plan: StepPlan) -> int:
        shape, layer = self._shape, self._shape.layer(0)
        packed = packed_bytes(layer.linears, plan)
        gathered = packed * (2 if plan.reshard_after_forward else shape.num_layers)
        wide = max(x.in_features + x.out_features for x in layer.linears)
        largest = plan.compute_bytes * max(x.num_weights for x in layer.linears)
        kept = plan.compute_bytes * plan.tokens * (wide + kept_elements(layer, plan))
        return kept + largest + (gathered if plan.shards > 1 or plan.offload_layers else 0)

    def _on_host(self, plan: StepPlan) -> list[int]:
        packed = packed_bytes(self._shape.layer(0).linears, plan)
        layers = [math.ceil(packed / plan.shards)] * plan.offload_layers
        return layers + [self._kept(plan, layer) for layer in self._away(plan)]


def made_up_work(shape: ModelShape, plan: StepPlan) -> Work:
    """Return the work of a plan, in few kinds: matmuls of frozen weights, their decoding, attention
    over rows, what elementwise work moves, the loss, the update, collectives, copies."""
    num_layers, layers = shape.num_layers, [shape.layer(x) for x in range(shape.num_layers)]
    size, tokens = plan.compute_bytes, plan.tokens
    weights = sum(x.num_weights // x.experts * y.rows(x) for y in layers for x in y.linears)
    packed = sum(layer_bytes(shape, plan))
    sizes = weights_by_path(shape)
    in_16_bits = size * sum(sizes[path] for path in kept_linears(plan.kept, sizes))
    kept = sum(size * tokens * kept_elements(layer, plan) for layer in layers)
    attended = 2.0 * tokens * plan.seq_len * sum(x.num_heads * x.head_dim for x in layers)
    per_layer = 7.0 * num_layers
    decoded = 1 - plan.keep_decoded / num_layers

    def passes(times: float) -> dict[str, Amount]:
        return {
            f"{work.MATMUL}@10": Amount(times * 2.0 * tokens * weights, 0.0, times * per_layer),
            work.DECODE: NOTHING.plus(
                Amount(0.0, 5.0 * (packed - in_16_bits), per_layer), times * decoded
            ),
            f"{work.EQUAL}@10": Amount(times * attended, 0.0, times * num_layers),
            work.MEMORY: Amount(0.0, times * 3.0 * kept, times * 20.0 * num_layers),
        }

    recomputed = len(plan.layers(num_layers).recomputed) / num_layers
    forward, backward = passes(1.0), passes(1.0 + recomputed)
    away = len(
        activation_offload_layers(
            plan.offload_activations,
            recomputation=plan.activation_checkpointing,
            num_layers=num_layers,
        )
    )
    stashed = away / num_layers * (size * tokens * shape.hidden_size if recomputed else kept)
    hosted = plan.offload_layers * packed / num_layers / plan.shards
    forward[work.TO_HOST] = Amount(0.0, stashed, away)
    forward[work.FROM_HOST] = Amount(0.0, hosted, plan.offload_layers)
    backward[work.FROM_HOST] = Amount(0.0, hosted + stashed, plan.offload_layers + away)
    if plan.shards > 1:
        gathered = f"{work.GATHER}/{plan.shards}/1{work.BESIDE}"
        forward[gathered] = Amount(0.0, packed, num_layers)
        backward[gathered] = Amount(0.0, packed * plan.reshard_after_forward, num_layers)
    logits = tokens * shape.vocab_size
    loss = {
        f"{work.MATMUL}@9": Amount(4.0 * logits * shape.hidden_size, 0.0, 16.0),
        work.MEMORY: Amount(0.0, (6.0 if plan.fused_loss else 36.0) * logits, 16.0),
    }
    states = 40.0 * trainable_parameters(shape, plan) / plan.shards
    update = {work.MEMORY: Amount(0.0, states, per_layer)}
    return Work({"forward": forward, "loss": loss, "backward": backward, work.UPDATE: update})
