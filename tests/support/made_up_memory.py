"""A recorder for tests of the search: peaks that grow as those of the engine do, made up from
shapes. Nothing needs torch."""

import math
from collections.abc import Callable, Sequence

from workflow.lib.model.architecture.layer_choice import activation_offload_layers, spread
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.memory.allocation_tape import HOST, Tape
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.model_sizes import (
    kept_elements,
    offload_window,
    packed_bytes,
    trainable_parameters,
)
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.units import MIB


class MadeUpMemory:
    """Knows what it was asked to record itself (`asked`); of that everything takes `share` times as
    much, by the number of the recording."""

    def __init__(self, shape: ModelShape, share: Callable[[int], float] = lambda _: 1.0) -> None:
        self.asked: list[StepPlan] = []
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
        return tape

    def _stored(self, plan: StepPlan) -> dict[str, int]:
        shape, trained = self._shape, trainable_parameters(self._shape, plan)
        tables = 2 - (shape.tied_embeddings or plan.offload_embedding) - plan.trained_tables
        table = shape.vocab_size * shape.hidden_size // plan.slices
        hosted = {*spread(plan.offload_layers, shape.num_layers)}
        here = [shape.layer(x) for x in range(shape.num_layers) if x not in hosted]
        return {
            "nf4_weights": sum(packed_bytes(x.linears, plan) for x in here) // plan.shards,
            "embedding_and_head": tables * plan.compute_bytes * table,
            "lora_weights": 4 * trained // plan.shards,
            "lora_gradients": 4 * trained // plan.shards,
            "adam_moments": (2 if plan.optimizer.endswith("8bit") else 8) * trained // plan.shards,
            "cublas_workspace": 64 * MIB,
        }

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
