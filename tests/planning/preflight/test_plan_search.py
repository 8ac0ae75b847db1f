"""The choice of a plan: the micro-batch, recomputation, and what is offloaded."""

from dataclasses import replace

from tests.support.decisions import AS_IT_WAS, decided, llama_8b, message, run_config
from tests.support.made_up_memory import MadeUpMemory
from tests.support.preflight_examples import (
    cpu_machine,
    llama_70b,
    llama_405b,
    llama_shape,
    machine,
    num_calls,
    setup,
    token_counts,
)
from workflow.lib.planning.machine import imagined_machine
from workflow.lib.planning.memory.recorded_peaks import RecordedPeaks
from workflow.lib.planning.preflight.budget import budget
from workflow.lib.planning.preflight.decision import decide
from workflow.lib.planning.preflight.plan_search import (
    UNSURE,
    Choices,
    NotRecordedError,
    Question,
    candidates,
    choose,
)
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.timing.machine_speed import speed_of
from workflow.lib.settings.config import HardwareConfig
from workflow.lib.step_plan.memory_options import LEVELS, in_words
from workflow.lib.system.gpu_models import BY_NAME
from workflow.lib.system.units import GIB


def searched(limits, *, levels):
    """Candidates of 1, 2 and 4 rows of a Llama-3-8B on two RTX 4090, with nothing offloaded and all
    weights freed."""
    speed = speed_of(machine())
    choices = Choices(sizes=[1, 2, 4], values={"activation_checkpointing": levels})
    plan = setup()
    lines = RecordedPeaks(
        plan, MadeUpMemory(llama_8b).peaks, rows=[1, 2, 4], levels=levels, num_layers=32
    )
    question = Question(llama_8b, machine(), speed, limits, 4, 1.0, lines)
    return candidates(question, plan, choices)


def test_auto_takes_the_largest_divisor_that_fits():
    decision = decided(
        train={"global_batch_size": 96, "activation_checkpointing": True}, hardware=AS_IT_WAS
    )
    fitting = [c.micro_batch_size for c in decision.candidates if c.fits]
    refused = [c.micro_batch_size for c in decision.candidates if not c.fits]
    assert [c.micro_batch_size for c in decision.candidates] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert refused, "the largest divisors must not fit here"
    assert decision.chosen.micro_batch_size == max(fitting) < min(refused)


def test_larger_margin_never_allows_a_larger_micro_batch():
    chosen = [
        decided(
            hardware={"memory_margin_gib": gib, **AS_IT_WAS},
            train={"global_batch_size": 128, "activation_checkpointing": True},
        ).chosen.micro_batch_size
        for gib in (0.0, 1.0, 4.0, 9.0)
    ]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[-1]


def test_cpu_prefers_at_most_eight_rows():
    tiny = llama_shape(layers=3, hidden=30, feed_forward=46, heads=3, kv_heads=1, vocab=101)
    decision = decided(tiny, cpu_machine(), train={"global_batch_size": 66}, data={"seq_len": 61})
    assert decision.chosen.micro_batch_size == 2  # divisors of 22: 1, 2, 11, 22
    assert all(c.fits for c in decision.candidates)


def test_no_more_layers_wait_on_the_host_than_a_plan_needs_to_fit():
    found = decided(llama_70b(), hardware=AS_IT_WAS | {"offload_layers": "auto"})
    count = found.chosen.plan.offload_layers
    assert 0 < count < 80
    fewer = replace(found.chosen.plan, offload_layers=count - 1)
    (peaks,) = MadeUpMemory(llama_70b()).peaks([fewer])
    assert not found.limits.holds(int(peaks.allocated_bytes * 1.01))


def one_gpu(gib, **sections):
    on = machine(processes=1, gpu_names=("NVIDIA H200",), gpu_bytes=gib * GIB)
    return decided(on=on, train={"global_batch_size": 2}, **sections)


def test_spare_memory_keeps_as_many_layers_decoded_as_fit():
    found = one_gpu(26)
    chosen = found.chosen.plan
    assert not chosen.activation_checkpointing
    assert 0 < chosen.keep_decoded < 32
    more = replace(chosen, keep_decoded=chosen.keep_decoded + 1)
    (peaks,) = MadeUpMemory(llama_8b).peaks([more])
    assert not found.limits.holds(peaks.allocated_bytes)
    assert one_gpu(80).chosen.plan.keep_decoded == 32


def test_no_layer_is_kept_decoded_where_memory_or_time_gains_nothing():
    """Without spare memory nothing is recorded for it; weights in 16 bits are not decoded."""
    for found in (
        one_gpu(12),
        one_gpu(80, quantize={"method": "none"}),
        one_gpu(80, hardware={"keep_decoded": 0}),
    ):
        assert {option.plan.keep_decoded for option in found.candidates} == {0}
    assert one_gpu(80, hardware={"keep_decoded": 5}).chosen.plan.keep_decoded == 5


def test_what_would_be_offloaded_unasked_leaves_half_of_the_host_alone():
    auto = AS_IT_WAS | {"offload_activations": "auto"}
    least = (
        min(c.host_bytes for c in decided(llama_70b(), hardware=auto).candidates if c.fits) / GIB
    )
    enough, short = (
        decided(llama_70b(), hardware=auto | {"host_memory_gib": share * least}).fits
        for share in (2.1, 1.9)
    )
    asked = {"host_memory_gib": 1.9 * least, "offload_activations": True}
    assert (enough, short) == (True, False)
    assert decided(llama_70b(), hardware=AS_IT_WAS | asked).fits


def test_plan_without_offloading_is_taken_unless_offloading_is_surely_faster():
    found = decided(llama_8b, machine(gpu_bytes=80 * GIB))
    faster = [c for c in found.candidates if c.fits and c.step_s < found.chosen.step_s]
    assert not found.chosen.plan.offload_activations
    for other in faster:
        assert other.step_s * (1 + UNSURE) >= found.chosen.step_s


def test_flags_that_are_set_are_respected():
    hardware = {"offload_activations": True, "reshard_after_forward": False}
    found = decided(on=machine(gpu_bytes=80 * GIB), hardware=hardware).candidates
    assert {(c.plan.offload_activations, c.plan.reshard_after_forward) for c in found} == {
        (True, False)
    }


def test_one_gpu_has_nothing_to_free_and_a_cpu_nothing_to_offload_to():
    one = decided(
        on=machine(processes=1, gpu_names=("NVIDIA H200",), gpu_bytes=80 * GIB)
    ).candidates
    cpu = decided(on=cpu_machine(processes=2)).candidates
    assert {c.plan.reshard_after_forward for c in (*one, *cpu)} == {True}
    assert {c.plan.offload_activations for c in cpu} == {False}


def test_slow_links_are_worth_keeping_weights_where_memory_allows():
    """Short rows leave too little compute to hide gathering behind PCIe; NVLink needs no such thing
    where Python's launches hide what gathering costs the GPU itself."""
    settings = {
        "data": {"seq_len": 512},
        "train": {"global_batch_size": 8},
        "hardware": {"cuda_graphs": False},
    }
    tokens, shape = token_counts(seq_len=512), llama_70b(layers=20)
    record = MadeUpMemory(shape)
    kept = [
        not decide(
            PlannedRun(run_config(**settings), shape, on, tokens, record)
        ).chosen.plan.reshard_after_forward
        for on in (
            imagined_machine(8, BY_NAME["NVIDIA RTX A6000"]),
            imagined_machine(8, BY_NAME["NVIDIA H200"]),
        )
    ]
    assert kept == [True, False]


def test_search_of_a_405b_is_a_few_million_calls():
    shape, run = llama_405b(), run_config(train={"global_batch_size": 1024})
    on = imagined_machine(8, BY_NAME["NVIDIA H100 80GB HBM3"])
    record, tokens = MadeUpMemory(shape), token_counts(seq_len=2048)
    found = []
    calls = num_calls(
        lambda: found.append(decide(PlannedRun(run, shape, on, tokens, record, estimate=True)))
    )
    assert found[0].fits
    # Half a second, with 1.6 million calls.
    assert calls < 5_000_000


def test_only_a_whole_step_in_one_micro_batch_does_not_accumulate():
    limits = budget(HardwareConfig(), machine())
    found = searched(limits, levels=[True])
    assert [c.plan.accumulates for c in found] == [True, True, False]


def test_fastest_that_fits_is_chosen_and_memory_decides_between_recomputation_and_rows():
    peaks = {}
    for gib in (7, 10, 16, 24, 40):
        limits = budget(HardwareConfig(), machine(gpu_bytes=gib * GIB))
        found = searched(limits, levels=[*LEVELS])
        chosen = choose(found, device="cuda")
        assert chosen.fits
        assert chosen.step_s == min(c.step_s for c in found if c.fits)
        peaks[gib] = (in_words(chosen.plan, 80)["recomputation"], chosen.micro_batch_size)
    assert peaks[7][0] == "all 80 layers"
    assert peaks[40] == ("no layers", 4)


def test_more_memory_never_makes_the_plan_slower():
    seconds = []
    for gib in range(7, 50, 3):
        limits = budget(HardwareConfig(), machine(gpu_bytes=gib * GIB))
        seconds.append(choose(searched(limits, levels=[*LEVELS]), device="cuda").step_s)
    assert seconds == sorted(seconds, reverse=True)


def test_gpu_that_no_table_knows_still_gets_a_plan():
    on = machine(gpu_names=("NVIDIA Future 9000",) * 2, gpu_bytes=96 * GIB)
    assert not decided(on=on).chosen.plan.activation_checkpointing


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
