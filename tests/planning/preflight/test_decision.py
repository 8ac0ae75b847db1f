"""The verdict on a plan: its memory, host memory and disk, the reason where it does not fit, and
the document for later stages."""

import re
from dataclasses import asdict, replace

import pytest

from tests.support.decisions import AS_IT_WAS, decided, llama_8b, run_config
from tests.support.made_up_memory import MadeUpMemory
from tests.support.preflight_examples import cpu_machine, llama_70b, machine, setup, token_counts
from workflow.lib.model.architecture.kept_linears import kept_linears
from workflow.lib.planning.model_sizes import offload_window
from workflow.lib.planning.preflight.budget import budget
from workflow.lib.planning.preflight.decision import MOST_REMEDIES, decide, remedies
from workflow.lib.planning.preflight.forecast import forecast
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.preflight.planning_inputs import plan_from_settings
from workflow.lib.settings.config import HardwareConfig, RunConfig
from workflow.lib.system.units import GIB


def predicted(run, on=None, **options):
    on, tokens, memory = on or machine(), token_counts(seq_len=2048), MadeUpMemory(llama_8b)
    planned = PlannedRun(run, llama_8b, on, tokens, memory, disk_free_bytes=10**12, **options)
    decision = decide(planned)
    return decision, forecast(decision, planned)


def test_cpu_share_of_host_memory_bounds_the_micro_batch():
    on = cpu_machine(processes=2, host_bytes=20 * GIB)
    decision = decided(on=on, train={"global_batch_size": 16})
    assert decision.limits.capacity_bytes == 10 * GIB
    assert not decision.candidates[-1].fits
    assert decision.chosen.host_bytes == 2 * decision.chosen.peak_bytes


def test_smaller_gpu_memory_is_the_capacity_and_is_enforced():
    run = run_config(hardware={"gpu_memory_gib": 13.0})
    decision, document = predicted(run)
    plan = document.plan
    assert decision.limits.capacity_bytes == 13 * GIB
    assert plan.gpu_memory_bytes == 13 * GIB - decision.limits.outside_allocator_bytes


def test_70b_that_may_not_offload_does_not_fit_and_the_reason_says_what_would():
    decision = decided(llama_70b(), hardware=AS_IT_WAS)
    assert not decision.fits
    for part in (
        "of 24.00 GiB of each GPU",
        "phase backward",
        "hardware.offload_",
    ):
        assert part in decision.reason
    assert len(re.findall(r"\(peak [\d.]+ GiB\)", decision.reason)) <= MOST_REMEDIES


def test_70b_fits_two_24_gib_gpus_because_something_waits_on_the_host():
    assert decided(llama_70b()).fits
    for name in ("offload_activations", "offload_layers"):
        assert decided(llama_70b(), hardware=AS_IT_WAS | {name: "auto"}).fits


def test_layers_on_the_host_count_as_host_memory():
    here, there = (
        decided(
            llama_8b, hardware=AS_IT_WAS | {"offload_layers": count}, train={"micro_batch_size": 1}
        ).chosen.host_bytes
        for count in (0, 5)
    )
    packed = 218_103_808 * (0.5 + 1 / 64) / 2  # of a layer, half on each GPU: 54 MiB, in 64
    assert packed < 64 * 2**20
    assert there - here == 2 * 5 * 64 * 2**20


def test_hopeless_run_says_that_no_single_change_is_enough():
    text = decided(llama_70b(), machine(gpu_bytes=2 * GIB), hardware={"context_parallel": 1}).reason
    assert (
        "No single change is enough; the largest savings are: hardware.offload_layers = 80" in text
    )


def test_too_many_cpu_processes_are_told_to_be_fewer():
    on = cpu_machine(processes=8, host_bytes=14 * GIB)
    assert "hardware.cpu_processes = 2 (peak" in decided(on=on).reason


def test_short_host_memory_is_the_reason_on_a_gpu():
    decision = decided(hardware={"host_memory_gib": 3.0})
    assert not decision.fits
    assert "of host memory together, 3.00 GiB may be used" in decision.reason


def test_short_disk_is_the_reason():
    decision = decided(free=10**6)
    assert not decision.fits
    assert "of disk, 976.56 KiB are free" in decision.reason
    assert "train.keep_checkpoints" in decision.reason


@pytest.mark.parametrize("wanted", ["auto", False])
def test_trained_embedding_is_on_the_devices(wanted):
    found = decided(
        lora={"modules_to_save": ["embed_tokens"]}, hardware={"offload_embedding": wanted}
    )
    setup = found.chosen.plan
    assert (setup.offload_embedding, setup.trains_embedding, setup.trains_head) == (
        False,
        True,
        False,
    )
    assert decided(lora={"modules_to_save": ["lm_head"]}).chosen.plan.offload_embedding


def test_processes_form_groups_that_each_share_a_copy():
    run = run_config(hardware={"shard_size": 2}, train={"global_batch_size": 16})
    on = machine(processes=4, gpu_names=("NVIDIA GeForce RTX 4090",) * 4)
    chosen = plan_from_settings(run, llama_8b, on)
    assert (chosen.replicas, chosen.shards) == (2, 2)
    plan = predicted(run, on)[1].plan
    assert (plan.processes, plan.shards) == (4, 2)


def test_every_candidate_says_why_it_was_not_chosen():
    plans = predicted(run_config())[1].candidates
    assert [plan.why for plan in plans].count("chosen") == 1
    for plan in plans:
        words = r"chosen|[\d.]+% slower|only [\d.]+% faster"
        too_much = r"[\d.]+ GiB (of host memory )?too much"
        assert re.fullmatch(words if plan.fits else too_much, plan.why)


def test_document_has_exactly_the_plan_that_later_stages_read():
    flags = AS_IT_WAS | {"offload_activations": True, "offload_layers": 3}
    run = run_config(train={"global_batch_size": 20, "epochs": 3.0}, hardware=flags)
    decision, document = predicted(run)
    size = decision.chosen.micro_batch_size
    plan = asdict(document.plan)
    assert plan == plan | {
        "device": "cuda",
        "processes": 2,
        "nodes": 1,
        "replicas": 1,
        "micro_batch_size": size,
        "accumulation_steps": 10 // size,
        "activation_checkpointing": decision.chosen.plan.activation_checkpointing,
        "reshard_after_forward": True,
        "offload_activations": True,
        "offload_window_bytes": offload_window(llama_8b, decision.chosen.plan),
        "offload_embedding": True,
        "offload_layers": 3,
        "cuda_graphs": True,
        "gpu_memory_bytes": None,
        "compute_dtype": "bfloat16",
        "num_steps": 6,  # 37 rows, 3 epochs, 20 a step
    }
    assert sum(term.bytes for term in document.terms) == document.peak_bytes
    assert document.reserved_bytes == document.peak_bytes + document.allocator_slack_bytes


def test_verdict_that_no_recording_confirms_says_so():
    for estimate, method in ((False, "replay"), (True, "lines")):
        decision, document = predicted(run_config(), estimate=estimate)
        assert (decision.fits, document.method) == (True, method)
        said = "estimated and not confirmed by a recording" in decision.reason
        assert said == estimate


def test_modules_that_are_trained_whole_are_in_every_checkpoint():
    """12 bytes a weight."""
    frozen, trained = (
        decided(lora={"modules_to_save": names}).disk_bytes
        for names in ([], ["lm_head", "embed_tokens"])
    )
    weights = 2 * llama_8b.vocab_size * llama_8b.hidden_size
    kept = run_config().train.keep_checkpoints + 1
    assert trained["checkpoints"] - frozen["checkpoints"] == 12 * kept * weights
    assert trained["adapter"] - frozen["adapter"] == 2 * 4 * weights


AUTO = HardwareConfig()


def remedies_of(shape, plan, on=None, hardware=AUTO, most=99):
    memory = MadeUpMemory(shape)
    (peaks,) = memory.peaks([plan])
    run = RunConfig(hardware=hardware)
    assert run.train.global_batch_size == 16
    planned = PlannedRun(run, shape, on or machine(), token_counts(seq_len=2048), memory)
    return remedies(planned, plan, before=peaks, most=most)


def rich(**changes):
    """A plan that has much to save."""
    values = {
        "micro_batch_size": 4, "activation_checkpointing": False, "dropout": 0.05, "rank": 64,
        "double_quant": False, "reshard_after_forward": False,
    }  # fmt: skip
    return setup(**values | changes)


def test_remedies_that_are_named_fit_the_nearest_first_and_no_more_than_asked_for():
    options = remedies_of(llama_8b, rich(), machine(gpu_bytes=30 * GIB), most=2)
    assert [option.change.split(" = ")[0] for option in options] == [
        "train.micro_batch_size", "train.activation_checkpointing",
    ]  # fmt: skip
    for remedy in options:
        assert remedy.fits
        assert budget(AUTO, machine(gpu_bytes=30 * GIB)).holds(remedy.peak_bytes)


def test_of_each_kind_the_smallest_change_that_fits_is_named():
    on = machine(gpu_bytes=30 * GIB)
    (rows,) = [x for x in remedies_of(llama_8b, rich(), on) if "micro_batch_size" in x.change]
    assert rows.change == "train.micro_batch_size = 2"
    (peaks,) = MadeUpMemory(llama_8b).peaks([rich()])
    assert not budget(AUTO, on).holds(peaks.allocated_bytes)


def test_where_none_is_enough_the_largest_savings_come_first():
    options = remedies_of(llama_70b(), rich(), machine(gpu_bytes=GIB))
    peaks = [option.peak_bytes for option in options]
    assert peaks == sorted(peaks)
    assert not any(option.fits for option in options)
    named = {str(option).split(" = ")[0] for option in options}
    assert {"train.micro_batch_size", "data.seq_len", "hardware.gpus", "lora.r"} <= named
    assert {"hardware.offload_layers", "hardware.reshard_after_forward"} <= named


def test_remedy_that_needs_more_host_memory_than_there_is_does_not_fit():
    on = machine(gpu_bytes=20 * GIB)
    few, many = (
        {
            remedy.change.split(" = ")[0]
            for remedy in remedies_of(llama_70b(), setup(), on, hardware)
            if remedy.fits
        }
        for hardware in (HardwareConfig(host_memory_gib=8.0), AUTO)
    )
    assert "hardware.offload_layers" in many - few


@pytest.mark.parametrize(
    ("quantize", "change"),
    [({"method": "none"}, "quantize.method = absmax"), ({"keep": ["mlp"]}, "quantize.keep = []")],
)
def test_fewer_bits_are_a_remedy(quantize, change):
    """8 billion weights take 13 GiB in 16 bits, of which NF4 leaves a quarter."""
    plan = plan_from_settings(run_config(quantize=quantize), llama_8b, machine())
    on = machine(gpu_bytes=14 * GIB)
    (remedy,) = [x for x in remedies_of(llama_8b, plan, on) if x.change == change]
    (peaks,) = MadeUpMemory(llama_8b).peaks([plan])
    kept = kept_linears(plan.kept, llama_8b.linear_paths())
    assert len(kept) == 32 * (7 if "method" in quantize else 3)
    assert remedy.peak_bytes < peaks.allocated_bytes - GIB


def test_frozen_modules_are_a_remedy():
    run = run_config(lora={"modules_to_save": ["lm_head", "embed_tokens"]})
    chosen = plan_from_settings(run, llama_8b, machine())
    options = remedies_of(llama_8b, chosen, hardware=run.hardware)
    assert [remedy for remedy in options if "modules_to_save" in str(remedy)]
    assert not any("offload_embedding" in str(remedy) for remedy in options)


def test_replicas_that_do_not_fit_may_become_one():
    options = remedies_of(llama_70b(), setup(processes=4, replicas=2), machine(processes=4))
    assert "hardware.shard_size = auto" in {str(option).split(" (")[0] for option in options}


FOUR = machine(processes=4, gpu_names=("NVIDIA GeForce RTX 4090",) * 4, host_bytes=256 * GIB)
LONG = {"seq_len": 65536}  # tokens that an RTX 4090 does not hold without offloading


def over_processes(shape=llama_8b, wanted="auto", data=LONG, hardware=AS_IT_WAS, **sections):
    """The decision on a row that up to 4 processes may share."""
    hardware = hardware | {"context_parallel": wanted, "tile_tokens": 0}
    return decided(shape, FOUR, hardware=hardware, data=data, **sections)


def shared(decision):
    """The processes to a row of each tried plan."""
    return {candidate.plan.context_parallel for candidate in decision.candidates}


@pytest.mark.parametrize(
    ("seq_len", "processes"), [(8192, 1), (LONG["seq_len"], 2), (2 * LONG["seq_len"], 4)]
)
def test_auto_divides_a_row_over_the_fewest_processes_that_fit(seq_len, processes):
    """And tries no more but all of them; each has the plan that the number itself gives."""
    decision = over_processes(data={"seq_len": seq_len})
    assert decision.fits
    assert decision.chosen.plan.context_parallel == processes
    assert shared(decision) == {1: {1}, 2: {1, 2, 4}, 4: {1, 2, 4}}[processes]
    assert decision.chosen == over_processes(wanted=processes, data={"seq_len": seq_len}).chosen


def test_fewest_processes_share_a_row_also_where_more_need_less_memory():
    train = {"activation_checkpointing": True, "micro_batch_size": 1}
    decision = over_processes(train=train)
    peaks = {x.plan.context_parallel: x.peak_bytes for x in decision.candidates if x.fits}
    assert peaks[4] < peaks[2]
    assert decision.chosen.plan.context_parallel == 2


def test_rows_are_not_divided_where_the_weights_alone_do_not_fit():
    small = replace(FOUR, gpu_bytes=4 * GIB, host_bytes=16 * GIB)
    decision = decided(llama_70b(), small)
    assert not decision.fits
    assert shared(decision) == {1}


def test_auto_offloads_before_it_divides_rows():
    decision = over_processes(hardware={})
    assert decision.fits
    assert shared(decision) == {1}


def test_row_that_fits_over_no_number_names_what_lacks_least():
    decision = over_processes(
        data={"seq_len": 131072}, hardware=AS_IT_WAS | {"gpu_memory_gib": 9.0}
    )
    assert not decision.fits
    assert shared(decision) == {1, 4}
    assert decision.reason.startswith("micro-batch 1 over 4 processes (recomputation: all 32")
    assert "hardware.offload_activations = true (peak" in decision.reason


INDIVISIBLE = {
    "recurrent": (replace(llama_8b, kinds=(replace(llama_8b.kinds[0], recurrent=True),)), {}),
    "rotary": (replace(llama_8b, rotates_by_length=True), {}),
    "one head": (replace(llama_8b, kinds=(replace(llama_8b.kinds[0], num_heads=1),)), {}),
    "sdpa": (llama_8b, {"attention": "sdpa"}),
    "dropout": (replace(llama_8b, attention_dropout=0.1), {"attention_dropout": "family"}),
}


@pytest.mark.parametrize("case", INDIVISIBLE)
def test_rows_that_processes_cannot_share_are_never_divided(case):
    shape, model = INDIVISIBLE[case]
    decision = over_processes(shape, model=model)
    assert not decision.fits
    assert shared(decision) == {1}
    assert "data.seq_len = " in decision.reason
