"""The search for a plan, corrected by what was recorded of plans that it has tried."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.support.decisions import AS_IT_WAS, decided, llama_8b, taking
from tests.support.preflight_examples import llama_70b, machine
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.closed_form import predict
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.units import GIB

HOSTED: dict[str, Any] = {
    "hardware": AS_IT_WAS | {"offload_layers": "auto"},
    "train": {"micro_batch_size": 1},
}


class RecordedAs:
    """Records a plan as one tensor: a share of what the closed form says, by the number of the
    recording.
    """

    def __init__(self, shape: ModelShape, share: Callable[[int], float]) -> None:
        self.asked: list[StepPlan] = []
        self._shape, self._share = shape, share

    def __call__(self, setup: StepPlan) -> Tape:
        share = self._share(len(self.asked))
        self.asked.append(setup)
        return taking(int(share * predict(self._shape, setup).peak_bytes))


def test_next_best_plan_is_taken_where_the_best_does_not_fit() -> None:
    record = RecordedAs(llama_8b, lambda number: 1.0 if number else 9.0)
    decision = decided(record=record)
    assert decision.fits
    assert decision.chosen.plan == record.asked[-1] != record.asked[0]
    assert decision.chosen.replayed is not None
    assert decision.candidates.count(decision.chosen) == 1


def test_plan_that_is_as_predicted_is_recorded_alone() -> None:
    record = RecordedAs(llama_8b, lambda _: 1.0)
    assert decided(record=record).chosen.plan == decided().chosen.plan
    assert len(record.asked) == 1


def test_plan_that_fits_by_what_was_recorded_of_others_is_found() -> None:
    """The closed form, which is too high here, takes it for one that does not fit."""
    shape = llama_70b()
    record = RecordedAs(shape, lambda _: 0.8)
    estimated, recorded = decided(shape), decided(shape, record=record)
    assert record.asked[0] == estimated.chosen.plan
    assert recorded.chosen.replayed is not None
    assert estimated.chosen.plan.offload_activations
    assert not recorded.chosen.plan.offload_activations
    assert recorded.chosen.plan not in [c.plan for c in estimated.candidates if c.fits]


def test_plan_that_is_hardly_faster_is_not_recorded() -> None:
    """By what was recorded fewer layers on the host would do, which saves less than 3%."""
    shape = llama_70b()
    record = RecordedAs(shape, lambda _: 0.9)
    found = decided(shape, record=record, **HOSTED)
    assert found.chosen.plan == decided(shape, **HOSTED).chosen.plan
    assert [found.chosen.plan] == record.asked
    alike = [replace(c.plan, offload_layers=0) for c in found.candidates if c.fits]
    assert alike.count(replace(found.chosen.plan, offload_layers=0)) == 2


def test_one_recording_shows_that_no_plan_fits() -> None:
    """The one that needs least; others need more by what was recorded, too."""
    shape = llama_70b()
    record = RecordedAs(shape, lambda _: 0.9)
    assert not decided(shape, machine(gpu_bytes=2 * GIB), record=record).fits
    assert len(record.asked) == 1
