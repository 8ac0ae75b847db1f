"""The search for a plan, corrected by what was recorded of plans that it has tried."""

from dataclasses import replace

from tests.support.decisions import AS_IT_WAS, decided, llama_8b, message
from tests.support.made_up_memory import MadeUpMemory
from tests.support.preflight_examples import llama_70b, machine
from workflow.lib.planning.preflight.plan_search import NotRecordedError
from workflow.lib.system.units import GIB

HOSTED = {"hardware": AS_IT_WAS | {"offload_layers": "auto"}, "train": {"micro_batch_size": 1}}


def test_next_best_plan_is_taken_where_the_best_does_not_fit():
    record = MadeUpMemory(llama_8b, lambda number: 1.0 if number else 9.0)
    decision = decided(record=record)
    assert decision.fits
    assert decision.chosen.plan == record.asked[-1] != record.asked[0]
    assert decision.chosen.replayed is not None
    assert decision.candidates.count(decision.chosen) == 1


def test_plan_that_is_as_predicted_is_recorded_alone():
    record = MadeUpMemory(llama_8b)
    assert decided(record=record).chosen.plan == decided(estimate=True).chosen.plan
    assert len(record.asked) == 1


def test_plan_that_is_hardly_faster_is_not_recorded():
    """By what was recorded fewer layers on the host would do, which saves less than 3%."""
    shape = llama_70b()
    record = MadeUpMemory(shape, lambda _: 0.97)
    found = decided(shape, record=record, **HOSTED)
    assert found.chosen.plan == decided(shape, **HOSTED).chosen.plan
    assert [found.chosen.plan] == record.asked
    alike = [replace(c.plan, offload_layers=0) for c in found.candidates if c.fits]
    assert alike.count(replace(found.chosen.plan, offload_layers=0)) == 2


def test_one_recording_shows_that_no_plan_fits():
    """The one that needs least."""
    shape = llama_70b()
    record = MadeUpMemory(shape)
    assert not decided(shape, machine(gpu_bytes=2 * GIB), record=record).fits
    assert len(record.asked) == 1


class Unrecorded(MadeUpMemory):
    def peaks(self, plans):
        raise NotRecordedError("the engine asks for values")

    def tape(self, plan):
        raise NotRecordedError("the engine asks for values")


def test_model_that_cannot_be_recorded_is_refused_with_what_gives_its_plan_by_hand():
    text = message(record=Unrecorded(llama_8b))
    assert text.startswith("the engine asks for values. So no plan can be searched.")
    assert "hardware.offload_layers to values other than auto" in text


def test_plan_by_hand_of_a_model_that_cannot_be_recorded_is_followed(caplog):
    found = decided(
        record=Unrecorded(llama_8b),
        train={"micro_batch_size": 2, "activation_checkpointing": True},
        hardware=AS_IT_WAS,
    )
    assert (found.fits, found.chosen.plan.micro_batch_size) == (True, 2)
    assert "cannot be predicted; the settings give the plan" in found.reason
    assert "is followed without a prediction" in caplog.text
