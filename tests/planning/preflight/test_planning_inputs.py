"""The choice of the micro-batch, the verdict, and what a user is told when a run cannot work or
does not fit.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.preflight_examples import (
    GPU_24,
    cpu_machine,
    llama_70b,
    llama_405b,
    llama_shape,
    machine,
    manifest,
    num_calls,
    setup,
)
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import Machine, imagined_machine
from workflow.lib.planning.memory import closed_form
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.memory.terms import moment_bytes, offload_window, offloaded_bytes
from workflow.lib.planning.preflight.decision import (
    MOST_REMEDIES,
    Decision,
    check_settings,
    check_tokens,
    decide,
    document,
)
from workflow.lib.planning.preflight.plan_search import (
    LEVELS,
    UNSURE,
    Candidate,
    Choices,
    Question,
    candidates,
    checkpointing_levels,
    choose,
    open_choices,
)
from workflow.lib.planning.preflight.planning_inputs import (
    Budget,
    attention_kind,
    budget,
    compute_dtype,
    divisors,
    host_bytes,
    make_setup,
    micro_batch_sizes,
    offloads_embedding,
    rows_per_process,
    shard_size,
)
from workflow.lib.planning.preflight.remedies import remedies
from workflow.lib.planning.timing.machine_speed import speed_of
from workflow.lib.settings.config import HardwareConfig, RunConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.gpu_models import BY_NAME
from workflow.lib.system.units import GIB

llama_8b = llama_shape(
    layers=32, hidden=4096, feed_forward=14336, heads=32, kv_heads=8, vocab=128256
)

# Settings that leave the plan nothing to choose but micro-batch and recomputation.
AS_IT_WAS = {"offload_activations": False, "offload_layers": 0, "reshard_after_forward": True}


def run_config(**sections: Any) -> RunConfig:
    """Settings for rows of 2,048 tokens and 16 rows a step."""
    data = {"seq_len": 2048} | sections.pop("data", {})
    return RunConfig.model_validate({"data": data} | sections)


def decided(
    shape: ModelShape = llama_8b, on: Machine | None = None, free: int = 10**12, **sections: Any
) -> Decision:
    return decide(
        run_config(**sections), shape, on or machine(), manifest(seq_len=2048), disk_free_bytes=free
    )


def message(**arguments: Any) -> str:
    """Return the message of the `UserError` that deciding raises."""
    with pytest.raises(UserError) as caught:
        decided(**arguments)
    return str(caught.value)


def searched(limits: Budget, *, levels: list[bool | int]) -> list[Candidate]:
    """Candidates of 1, 2 and 4 rows of a Llama-3-8B on two RTX 4090, with nothing offloaded and all
    weights freed.
    """
    speed = speed_of(machine(), calibration=None)
    choices = Choices(sizes=[1, 2, 4], levels=levels, offload=[False], reshard=[True])
    question = Question(llama_8b, machine(), speed, limits, rows=4, trained_share=1.0)
    return candidates(question, setup(), choices)


def test_auto_takes_the_largest_divisor_that_fits() -> None:
    decision = decided(
        train={"global_batch_size": 96, "activation_checkpointing": True},
        hardware=AS_IT_WAS,
    )
    fitting = [c.micro_batch_size for c in decision.found if c.fits]
    refused = [c.micro_batch_size for c in decision.found if not c.fits]
    assert [c.micro_batch_size for c in decision.found] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert refused, "the largest divisors must not fit here"
    assert decision.chosen.micro_batch_size == max(fitting) < min(refused)


def test_margin_slack_and_context_count() -> None:
    limits = Budget(1000, outside_allocator_bytes=100, margin_bytes=50, host_capacity_bytes=0)
    assert limits.holds(825)  # 825 + 24 of slack (3%) + 150 = 999
    assert not limits.holds(827)


def test_larger_margin_never_allows_a_larger_micro_batch() -> None:
    chosen = [
        decided(
            hardware={"memory_margin_gib": gib, **AS_IT_WAS},
            train={"global_batch_size": 128, "activation_checkpointing": True},
        ).chosen.micro_batch_size
        for gib in (0.0, 1.0, 4.0, 9.0)
    ]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[-1]


def test_fixed_micro_batch_is_respected() -> None:
    decision = decided(train={"global_batch_size": 16, "micro_batch_size": 2})
    assert {c.micro_batch_size for c in decision.found} == {2}


def test_fixed_micro_batch_that_does_not_divide_lists_the_valid() -> None:
    text = message(train={"global_batch_size": 20, "micro_batch_size": 3})
    assert text == (
        "train.micro_batch_size = 3: must divide the 10 rows that each of 2 processes has of a "
        "step. "
        "Set it to 1, 2, 5, 10, or auto."
    )


def test_global_batch_that_processes_cannot_share_names_the_nearest() -> None:
    text = message(on=machine(processes=3), train={"global_batch_size": 16})
    assert text == (
        "train.global_batch_size = 16: must be a multiple of the 3 processes, which share its rows "
        "equally. "
        "Set it to 15 or 18, or change hardware.gpus (hardware.cpu_processes on the CPU)."
    )


def test_global_batch_smaller_than_the_processes_names_only_what_is_possible() -> None:
    with pytest.raises(UserError, match="Set it to 5, or"):
        rows_per_process(3, processes=5)


def test_cpu_prefers_at_most_eight_rows() -> None:
    tiny = llama_shape(layers=3, hidden=30, feed_forward=46, heads=3, kv_heads=1, vocab=101)
    decision = decided(tiny, cpu_machine(), train={"global_batch_size": 66}, data={"seq_len": 61})
    assert decision.chosen.micro_batch_size == 2  # divisors of 22: 1, 2, 11, 22
    assert all(c.fits for c in decision.found)


def test_cpu_share_of_host_memory_bounds_the_micro_batch() -> None:
    on = cpu_machine(processes=2, host_bytes=36 * GIB)
    decision = decided(on=on, train={"global_batch_size": 16})
    assert decision.limits.capacity_bytes == 18 * GIB
    assert not decision.found[-1].fits
    assert decision.host_bytes == 2 * decision.chosen.prediction.peak_bytes


def test_smaller_gpu_memory_is_the_capacity_and_is_enforced() -> None:
    run = run_config(hardware={"gpu_memory_gib": 13.0})
    decision = decide(run, llama_8b, machine(), manifest(seq_len=2048), disk_free_bytes=10**12)
    plan = document(decision, run, llama_8b, machine(), manifest(seq_len=2048))["plan"]
    assert decision.limits.capacity_bytes == 13 * GIB
    assert plan["gpu_memory_bytes"] == 13 * GIB - decision.limits.outside_allocator_bytes


def test_automatic_gpu_memory_enforces_nothing() -> None:
    run = run_config()
    decision = decide(run, llama_8b, machine(), manifest(seq_len=2048), disk_free_bytes=10**12)
    plan = document(decision, run, llama_8b, machine(), manifest(seq_len=2048))["plan"]
    assert plan["gpu_memory_bytes"] is None


def test_more_gpu_memory_than_there_is_is_refused() -> None:
    text = message(hardware={"gpu_memory_gib": 80.0})
    assert "hardware.gpu_memory_gib = 80.0: the smallest GPU has 24.00 GiB" in text


def test_unknown_lora_target_is_refused() -> None:
    text = message(lora={"target_modules": ["q_proj", "query"]})
    assert "lora.target_modules = 'query'" in text
    assert "q_proj, k_proj, v_proj" in text


def test_70b_that_may_not_offload_does_not_fit_and_the_reason_says_what_would() -> None:
    decision = decided(llama_70b(), hardware=AS_IT_WAS)
    assert not decision.fits
    for part in ("of 24.00 GiB of each GPU", "phase backward", "hardware.gpus = 4 (peak"):
        assert part in decision.reason
    assert len(re.findall(r"\(peak [\d.]+ GiB\)", decision.reason)) <= MOST_REMEDIES


def test_70b_fits_two_24_gib_gpus_because_something_waits_on_the_host() -> None:
    assert decided(llama_70b()).fits
    for name in ("offload_activations", "offload_layers"):
        assert decided(llama_70b(), hardware=AS_IT_WAS | {name: "auto"}).fits


def test_no_more_layers_wait_on_the_host_than_a_plan_needs_to_fit() -> None:
    found = decided(llama_70b(), hardware=AS_IT_WAS | {"offload_layers": "auto"})
    count = found.chosen.setup.offload_layers
    assert 0 < count < 80
    fewer = replace(found.chosen.setup, offload_layers=count - 1)
    assert not found.limits.holds(closed_form.predict(llama_70b(), fewer).peak_bytes)


def test_what_would_be_offloaded_unasked_leaves_half_of_the_host_alone() -> None:
    auto = AS_IT_WAS | {"offload_activations": "auto"}
    least = min(c.host_bytes for c in decided(llama_70b(), hardware=auto).found if c.fits) / GIB
    enough, short = (
        decided(llama_70b(), hardware=auto | {"host_memory_gib": share * least}).fits
        for share in (2.1, 1.9)
    )
    asked = {"host_memory_gib": 1.9 * least, "offload_activations": True}
    assert (enough, short) == (True, False)
    assert decided(llama_70b(), hardware=AS_IT_WAS | asked).fits


def test_plan_without_offloading_is_taken_unless_offloading_is_surely_faster() -> None:
    found = decided(llama_8b, machine(gpu_bytes=80 * GIB))
    faster = [c for c in found.found if c.fits and c.step_s < found.chosen.step_s]
    assert not found.chosen.setup.offload_activations
    for other in faster:
        assert other.step_s * (1 + UNSURE) >= found.chosen.step_s


def test_flags_that_are_set_are_respected() -> None:
    hardware = {"offload_activations": True, "reshard_after_forward": False}
    found = decided(on=machine(gpu_bytes=80 * GIB), hardware=hardware).found
    assert {(c.setup.offload_activations, c.setup.reshard_after_forward) for c in found} == {
        (True, False)
    }


def test_one_gpu_has_nothing_to_free_and_a_cpu_nothing_to_offload_to() -> None:
    one = decided(on=machine(processes=1, gpu_names=("NVIDIA H200",), gpu_bytes=80 * GIB)).found
    cpu = decided(on=cpu_machine(processes=2)).found
    assert {c.setup.reshard_after_forward for c in (*one, *cpu)} == {True}
    assert {c.setup.offload_activations for c in cpu} == {False}


def test_slow_links_are_worth_keeping_weights_where_memory_allows() -> None:
    """Short rows leave too little compute to hide gathering behind PCIe; NVLink needs no such
    thing.
    """
    settings = {"data": {"seq_len": 512}, "train": {"global_batch_size": 8}}
    tokens = manifest(seq_len=512)
    kept = [
        not decide(
            run_config(**settings), llama_70b(layers=20), on, tokens, disk_free_bytes=None
        ).chosen.setup.reshard_after_forward
        for on in (
            imagined_machine(8, BY_NAME["NVIDIA RTX A6000"]),
            imagined_machine(8, BY_NAME["NVIDIA H200"]),
        )
    ]
    assert kept == [True, False]


def test_search_and_replay_of_a_405b_are_a_few_million_calls() -> None:
    shape, run = llama_405b(), run_config(train={"global_batch_size": 1024})
    on = imagined_machine(8, BY_NAME["NVIDIA H100 80GB HBM3"])
    decision = decide(run, shape, on, manifest(seq_len=2048), disk_free_bytes=None)
    assert decision.fits
    question = Question(shape, on, decision.speed, decision.limits, decision.rows, 1.0)
    choices = open_choices(run, on, sizes=divisors(decision.rows), num_layers=shape.num_layers)
    left_open = make_setup(run, shape, on)
    assert len(candidates(question, left_open, choices)) == len(decision.found)
    # Half a second each, with 1.6 and 2.3 million calls.
    assert num_calls(lambda: candidates(question, left_open, choices)) < 5_000_000
    assert num_calls(lambda: replay(shape, decision.chosen.setup)) < 8_000_000


def test_every_remedy_that_is_said_to_fit_does_fit() -> None:
    chosen = setup(micro_batch_size=4, activation_checkpointing=False, dropout=True, rank=64)
    hardware = HardwareConfig()
    options = remedies(llama_70b(), chosen, machine(), hardware, global_batch_size=16)
    assert options
    for remedy in options:
        assert remedy.fits == budget(hardware, machine()).holds(remedy.peak_bytes)


def test_remedies_that_fit_come_first() -> None:
    options = remedies(
        llama_70b(), setup(dropout=True), machine(), HardwareConfig(), global_batch_size=16
    )
    fits = [option.fits for option in options]
    assert fits == sorted(fits, reverse=True)
    assert len(set(fits)) == 2


def test_remedies_name_every_setting_that_helps() -> None:
    chosen = setup(
        micro_batch_size=4, seq_len=512, activation_checkpointing=False, dropout=True,
        rank=64, double_quant=False, reshard_after_forward=False,
    )  # fmt: skip
    options = remedies(llama_8b, chosen, machine(), HardwareConfig(), global_batch_size=16)
    named = {str(option).split(" = ")[0] for option in options}
    assert named == {
        "train.micro_batch_size", "train.activation_checkpointing", "data.seq_len", "hardware.gpus",
        "lora.r", "quantize.double_quant", "lora.dropout", "hardware.reshard_after_forward",
        "train.fused_layers", "hardware.offload_activations", "hardware.offload_embedding",
        "hardware.offload_layers", "train.optimizer",
    }  # fmt: skip


def test_offloading_from_host_memory_to_host_memory_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"hardware\.offload_activations = True: this run is on CPUs"
    ):
        decided(on=cpu_machine(processes=2), hardware={"offload_activations": True})


def test_activations_of_more_layers_than_there_are_cannot_be_offloaded() -> None:
    with pytest.raises(
        UserError, match=r"hardware\.offload_activations = 33: the model has 32 decoder layers"
    ):
        decided(llama_8b, hardware={"offload_activations": 33})


def test_offloaded_activations_count_as_host_memory() -> None:
    stay, leave = (
        decided(llama_8b, hardware={"offload_activations": flag, "offload_embedding": False})
        for flag in (False, True)
    )
    expected = offloaded_bytes(llama_8b, leave.chosen.setup)
    assert leave.host_bytes - stay.host_bytes == 2 * expected > 0


def test_layers_on_the_host_count_as_host_memory() -> None:
    here, there = (
        decided(
            llama_8b, hardware=AS_IT_WAS | {"offload_layers": count}, train={"micro_batch_size": 1}
        ).host_bytes
        for count in (0, 5)
    )
    packed = 218_103_808 * (0.5 + 1 / 64) / 2  # of a layer, half on each GPU: 54 MiB, in 64
    assert packed < 64 * 2**20
    assert there - here == 2 * 5 * 64 * 2**20


def test_more_layers_on_the_host_than_there_are_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"hardware\.offload_layers = 33: the model has 32 decoder layers"
    ):
        decided(llama_8b, hardware={"offload_layers": 33})


def test_layers_from_host_memory_to_host_memory_are_refused() -> None:
    with pytest.raises(UserError, match=r"hardware\.offload_layers = 1: this run is on CPUs"):
        decided(on=cpu_machine(processes=2), hardware={"offload_layers": 1})


OLD = {"bfloat16": False, "gpu_names": ("Tesla V100-SXM2-32GB",) * 2, "gpu_bytes": 32 * GIB}


def test_gpus_without_bfloat16_compute_in_float16_and_without_flash_attention() -> None:
    run = run_config()
    assert compute_dtype("auto", machine(**OLD)) == "float16"
    found = make_setup(run, llama_8b, machine(**OLD))
    assert (found.compute_bytes, found.attention) == (2, "sdpa")


def test_bfloat16_on_gpus_without_it_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"model\.compute_dtype = 'bfloat16': this GPU .* has no bfloat16"
    ):
        decided(on=machine(**OLD), model={"compute_dtype": "bfloat16"})


def test_float16_on_cpus_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"model\.compute_dtype = 'float16': it is for GPUs.* Set it to auto"
    ):
        decided(on=cpu_machine(processes=2), model={"compute_dtype": "float16"})


def test_paged_moments_without_a_gpu_are_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"train\.optimizer = 'paged_adamw_8bit': this run is on CPUs.* Set it to adamw_8bit",
    ):
        decided(on=cpu_machine(processes=2), train={"optimizer": "paged_adamw_8bit"})


def test_paged_moments_count_as_host_memory() -> None:
    here, there = (
        decided(llama_8b, lora={"r": 64}, train={"optimizer": name})
        for name in ("adamw_8bit", "paged_adamw_8bit")
    )
    paged = moment_bytes(llama_8b, there.chosen.setup)[1]
    assert there.host_bytes - here.host_bytes == 2 * paged > 0


def test_remedy_that_needs_more_host_memory_than_there_is_does_not_fit() -> None:
    hardware = HardwareConfig(host_memory_gib=8.0)
    chosen, on = setup(micro_batch_size=1), machine(gpu_bytes=20 * GIB)
    few, many = (
        next(
            remedy
            for remedy in remedies(llama_70b(), chosen, on, settings, global_batch_size=2)
            if "offload_layers" in remedy.change
        )
        for settings in (hardware, HardwareConfig())
    )
    assert (few.fits, many.fits) == (False, True)


def test_hopeless_run_says_that_no_single_change_is_enough() -> None:
    text = decided(llama_70b(), machine(gpu_bytes=2 * GIB)).reason
    assert (
        "No single change is enough; the largest savings are: hardware.offload_layers = 80" in text
    )


def test_too_many_cpu_processes_are_told_to_be_fewer() -> None:
    on = cpu_machine(processes=8, host_bytes=14 * GIB)
    assert "hardware.cpu_processes = 2 (peak" in decided(on=on).reason


def test_short_host_memory_is_the_reason_on_a_gpu() -> None:
    decision = decided(hardware={"host_memory_gib": 3.0})
    assert not decision.fits
    assert "of host memory together, 3.00 GiB may be used" in decision.reason


def test_short_disk_is_the_reason() -> None:
    decision = decided(free=10**6)
    assert not decision.fits
    assert "GiB of disk" in decision.reason
    assert "train.keep_checkpoints" in decision.reason


@pytest.mark.parametrize(
    ("setting", "device", "installed", "kind"),
    [
        ("auto", "cuda", True, "flash"),
        ("auto", "cuda", False, "flash"),
        ("varlen", "cuda", False, "flash"),
        ("auto", "cpu", True, "sdpa"),
        ("sdpa", "cuda", True, "sdpa"),
        ("eager", "cuda", True, "eager"),
        ("flash_attention_3", "cuda", False, "flash"),
    ],
)
def test_attention_is_what_the_engine_will_use(
    setting: str, device: str, installed: bool, kind: str
) -> None:
    model = run_config(model={"attention": setting}).model
    on = replace(machine(device=device), flash_attention=installed)
    assert attention_kind(model, on, softcapped=False) == kind


@pytest.mark.parametrize(("installed", "kind"), [(True, "flash"), (False, "eager")])
def test_soft_capped_scores_need_the_package_or_eager(installed: bool, kind: str) -> None:
    on = replace(machine(), flash_attention=installed)
    assert attention_kind(run_config().model, on, softcapped=True) == kind


def test_flash_needs_a_half_type() -> None:
    model = run_config(model={"compute_dtype": "float32"}).model
    assert attention_kind(model, machine(), softcapped=False) == "sdpa"


@pytest.mark.parametrize(
    ("wanted", "where", "offloaded"),
    [
        ("auto", machine(), True),
        ("auto", machine(processes=1), False),
        ("auto", cpu_machine(), False),
        (True, machine(processes=1), True),
        (False, machine(), False),
    ],
    ids=["several GPUs", "one GPU", "CPU", "asked for", "asked not to"],
)
def test_embedding_is_on_the_host_where_it_spares_a_gpu(
    wanted: bool | str, where: Machine, offloaded: bool
) -> None:
    assert offloads_embedding(wanted, llama_8b, where, trained=False) is offloaded


@pytest.mark.parametrize(
    ("where", "tied", "why"),
    [
        (cpu_machine(), False, "without a GPU there is no other memory than the host's"),
        (machine(processes=1), True, "this model's embedding is its output head too"),
    ],
    ids=["CPU", "tied on one GPU"],
)
def test_embedding_on_the_host_that_saves_nothing_is_refused(
    where: Machine, tied: bool, why: str
) -> None:
    shape = replace(llama_8b, tied_embeddings=tied)
    with pytest.raises(UserError, match=f"hardware.offload_embedding = True: {why}"):
        offloads_embedding(True, shape, where, trained=False)


@pytest.mark.parametrize("wanted", ["auto", False])
def test_trained_embedding_is_on_the_devices(wanted: bool | str) -> None:
    found = decided(
        lora={"modules_to_save": ["embed_tokens"]}, hardware={"offload_embedding": wanted}
    )
    setup = found.chosen.setup
    assert (setup.offload_embedding, setup.trains_embedding, setup.trains_head) == (
        False,
        True,
        False,
    )
    assert decided(lora={"modules_to_save": ["lm_head"]}).chosen.setup.offload_embedding


def test_trained_embedding_on_the_host_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"hardware\.offload_embedding = True: lora\.modules_to_save trains the embedding.* "
        r"or take embed_tokens out of lora\.modules_to_save",
    ):
        decided(lora={"modules_to_save": ["embed_tokens"]}, hardware={"offload_embedding": True})


def test_modules_of_a_tied_model_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"lora\.modules_to_save = \['lm_head'\]: this model ties its output head"
    ):
        decided(replace(llama_8b, tied_embeddings=True), lora={"modules_to_save": ["lm_head"]})


def test_run_with_trained_modules_needs_memory_and_disk_for_them() -> None:
    """16 bytes a weight of the slices at least, and 12 in every checkpoint."""
    frozen, trained = (
        decided(lora={"modules_to_save": names}, hardware={"offload_embedding": False})
        for names in ([], ["lm_head", "embed_tokens"])
    )
    weights = 2 * llama_8b.vocab_size * llama_8b.hidden_size
    at_rest = [
        sum(found.chosen.prediction.phases["optimizer_step"].values()) - stored_inputs(found)
        for found in (frozen, trained)
    ]
    assert at_rest[1] - at_rest[0] == (16 - 2) * weights // 2  # of two slices, and 2 bytes frozen
    kept = run_config().train.keep_checkpoints + 1
    disk = {key: trained.disk_bytes[key] - frozen.disk_bytes[key] for key in frozen.disk_bytes}
    assert disk["checkpoints"] == 12 * kept * weights
    assert disk["adapter"] == 2 * 4 * weights


def stored_inputs(found: Decision) -> int:
    return found.chosen.prediction.phases["optimizer_step"]["inputs"]


def test_frozen_modules_are_a_remedy() -> None:
    run = run_config(lora={"modules_to_save": ["lm_head", "embed_tokens"]})
    chosen = make_setup(run, llama_8b, machine())
    options = remedies(llama_8b, chosen, machine(), run.hardware, global_batch_size=16)
    (option,) = [remedy for remedy in options if "modules_to_save" in str(remedy)]
    assert option.peak_bytes < closed_form.predict(llama_8b, chosen).peak_bytes
    assert not any("offload_embedding" in str(remedy) for remedy in options)


def test_host_holds_the_embedding_once_and_the_rows_of_each_process() -> None:
    chosen = setup(micro_batch_size=4)
    there, away = (
        host_bytes(llama_8b, replace(chosen, offload_embedding=x), machine(), peak_bytes=0)
        for x in (False, True)
    )
    assert away - there == 2 * 4 * 2048 * 4096 * 2
    assert there > 2 * llama_8b.vocab_size * 4096


def test_setup_follows_the_settings() -> None:
    run = run_config(
        lora={"r": 7, "dropout": 0.1, "target_modules": ["v_proj"]},
        quantize={"block_size": 128, "double_quant": False},
        hardware={"reshard_after_forward": False},
    )
    found = make_setup(run, llama_8b, machine())
    expected = setup(
        rank=7, dropout=True, targets=("v_proj",), block_size=128, double_quant=False,
        reshard_after_forward=False, accumulates=True, fused_layers=True, offload_embedding=True,
    )  # fmt: skip
    assert found == expected


def test_rank_of_a_name_is_the_largest_of_its_layers() -> None:
    run = run_config(
        lora={"r": 8, "use_dora": True, "rank_pattern": {r"layers\.3\.q_proj": 64, "v_proj": 4}}
    )
    found = make_setup(run, llama_8b, machine())
    assert (found.rank, found.ranks, found.dora) == (8, {"q_proj": 64, "v_proj": 4}, True)
    assert [found.rank_of(name) for name in ("q_proj", "k_proj", "v_proj")] == [64, 8, 4]


def test_only_a_whole_step_in_one_micro_batch_does_not_accumulate() -> None:
    limits = budget(HardwareConfig(), machine())
    found = searched(limits, levels=[True])
    assert [c.setup.accumulates for c in found] == [True, True, False]


def test_processes_form_groups_that_each_share_a_copy() -> None:
    run = run_config(hardware={"shard_size": 2}, train={"global_batch_size": 16})
    on = machine(processes=4, gpu_names=("NVIDIA GeForce RTX 4090",) * 4)
    chosen = make_setup(run, llama_8b, on)
    assert (chosen.replicas, chosen.shards) == (2, 2)
    decision = decide(run, llama_8b, on, manifest(seq_len=2048), disk_free_bytes=10**12)
    plan = document(decision, run, llama_8b, on, manifest(seq_len=2048))["plan"]
    assert (plan["processes"], plan["shard_size"]) == (4, 2)


def test_groups_that_leave_a_process_over_are_refused() -> None:
    with pytest.raises(UserError) as caught:
        shard_size(4, processes=6)
    assert str(caught.value) == (
        "hardware.shard_size = 4: must divide the 6 processes of the run into equal groups. Set it "
        "to 2, 3, 6, or auto."
    )


def test_replicas_that_do_not_fit_may_become_one() -> None:
    chosen = setup(processes=4, replicas=2)
    options = remedies(
        llama_70b(), chosen, machine(processes=4), HardwareConfig(), global_batch_size=16
    )
    assert "hardware.shard_size = auto" in {str(option).split(" (")[0] for option in options}


def test_smallest_candidate_is_shown_when_none_fits() -> None:
    limits = budget(HardwareConfig(), machine(gpu_bytes=GIB))
    smallest = choose(searched(limits, levels=[*LEVELS]), device="cuda")
    assert (smallest.micro_batch_size, smallest.recomputation) == (1, "every layer")


def test_fastest_that_fits_is_chosen_and_memory_decides_between_recomputation_and_rows() -> None:
    peaks = {}
    for gib in (10, 16, 24, 40, 96):
        limits = budget(HardwareConfig(), machine(gpu_bytes=gib * GIB))
        found = searched(limits, levels=[*LEVELS])
        chosen = choose(found, device="cuda")
        assert chosen.fits
        assert chosen.step_s == min(c.step_s for c in found if c.fits)
        peaks[gib] = (chosen.recomputation, chosen.micro_batch_size)
    assert peaks[10][0] == "every layer"
    assert peaks[96] == ("none", 4)


def test_more_memory_never_makes_the_plan_slower() -> None:
    seconds = []
    for gib in range(10, 100, 4):
        limits = budget(HardwareConfig(), machine(gpu_bytes=gib * GIB))
        seconds.append(choose(searched(limits, levels=[*LEVELS]), device="cuda").step_s)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    ("wanted", "levels"), [(True, [True]), (False, [False]), (3, [3]), ("auto", [*LEVELS])]
)
def test_recomputation_that_is_set_is_respected(
    wanted: bool | int | str, levels: list[bool | int]
) -> None:
    assert checkpointing_levels(wanted) == levels


def test_gpu_that_no_table_knows_still_gets_a_plan() -> None:
    on = machine(gpu_names=("NVIDIA Future 9000",) * 2, gpu_bytes=96 * GIB)
    assert decided(on=on).chosen.recomputation == "none"


def test_every_candidate_says_why_it_was_not_chosen() -> None:
    run = run_config()
    tokens = manifest(seq_len=2048)
    decision = decide(run, llama_8b, machine(), tokens, disk_free_bytes=10**12)
    told = document(decision, run, llama_8b, machine(), tokens)["candidates"]
    assert [c["why"] for c in told].count("chosen") == 1
    for candidate in told:
        words = r"chosen|[\d.]+% slower|only [\d.]+% faster"
        too_much = r"[\d.]+ GiB (of host memory )?too much"
        assert re.fullmatch(words if candidate["fits"] else too_much, candidate["why"])


@given(st.integers(1, 100_000))
def test_divisors_are_all_and_in_order(number: int) -> None:
    found = divisors(number)
    assert found == sorted(set(found))
    assert len(found) == sum(1 for d in range(1, number + 1) if number % d == 0)


def test_auto_considers_every_divisor() -> None:
    assert micro_batch_sizes("auto", rows=22, processes=3) == [1, 2, 11, 22]


def test_document_has_exactly_the_plan_that_later_stages_read() -> None:
    flags = AS_IT_WAS | {"offload_activations": True, "offload_layers": 3}
    run = run_config(train={"global_batch_size": 20, "epochs": 3.0}, hardware=flags)
    decision = decide(run, llama_8b, machine(), manifest(seq_len=2048), disk_free_bytes=10**12)
    found = document(decision, run, llama_8b, machine(), manifest(seq_len=2048))
    size = decision.chosen.micro_batch_size
    assert found["plan"] == {
        "device": "cuda",
        "processes": 2,
        "nodes": 1,
        "shard_size": 2,
        "micro_batch_size": size,
        "accumulation_steps": 10 // size,
        "activation_checkpointing": decision.chosen.setup.activation_checkpointing,
        "reshard_after_forward": True,
        "offload_activations": True,
        "offload_window_bytes": offload_window(llama_8b, decision.chosen.setup),
        "offload_embedding": True,
        "offload_layers": 3,
        "gpu_memory_bytes": None,
        "compute_dtype": "bfloat16",
        "num_steps": 6,  # 37 rows, 3 epochs, 20 a step
    }
    assert sum(term["bytes"] for term in found["terms"]) == found["peak_bytes"]
    assert found["peak_bytes"] == replay(llama_8b, decision.chosen.setup).allocated_bytes
    assert found["reserved_bytes"] == found["peak_bytes"] + found["allocator_slack_bytes"]


def test_context_is_what_was_measured_outside_the_allocator() -> None:
    assert budget(HardwareConfig(), machine()).outside_allocator_bytes == int(1.58 * GIB)
    assert budget(HardwareConfig(), machine(processes=1)).outside_allocator_bytes == int(0.76 * GIB)


def test_sequence_longer_than_the_model_is_refused() -> None:
    shape = replace(llama_8b, max_position_embeddings=1024)
    with pytest.raises(
        UserError, match=r"data\.seq_len = 2048: the model's max_position_embeddings is 1024"
    ):
        check_tokens(manifest(seq_len=2048), run_config(), shape)


def test_rows_whose_documents_longrope_would_rotate_by_another_ones_length_are_refused() -> None:
    shape = replace(llama_8b, short_positions=2047)
    with pytest.raises(UserError) as caught:
        check_tokens(manifest(seq_len=2048), run_config(), shape)
    assert str(caught.value) == (
        "data.seq_len = 2048: this model's LongRoPE rotates every position of a micro-batch by its "
        "long factors as soon "
        "as one position is beyond original_max_position_embeddings, which is 2047: shorter "
        "documents beside a long one, "
        "or beside a long padding tail, would be trained with other positions than they are used "
        "with. Set it to 2047 or "
        "below, or choose a model without LongRoPE."
    )
    check_tokens(manifest(seq_len=2048), run_config(), replace(llama_8b, short_positions=2048))


def test_tokens_of_another_length_are_refused() -> None:
    with pytest.raises(UserError, match="packed into rows of 61"):
        check_tokens(manifest(), run_config(), llama_8b)


def test_vocabulary_larger_than_the_embedding_is_refused() -> None:
    tokens = manifest(seq_len=2048, vocab_size=128257)
    with pytest.raises(UserError, match="128257 tokens, the model's embedding 128256"):
        check_tokens(tokens, run_config(), llama_8b)


def test_24_gib_is_24_gib() -> None:
    assert machine().gpu_bytes == GPU_24 == 24 * GIB


TWO = {"gpus": 2}
UNTIED = llama_70b()
# Of these, what stands first is known of the model alone; the rest needs the number of processes.
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"data": {"seq_len": 2**18}}, "data.seq_len = 262144: the model's max_position_embeddings is"),
    ({"lora": {"target_modules": ["qq"]}}, "lora.target_modules = 'qq': no linear layer"),
    ({"lora": {"modules_to_save": ["norm"]}}, "lora.modules_to_save = 'norm': only the output"),
    ({"hardware": {"gpu_model": "H900"}}, "hardware.gpu_model = 'H900': no GPU of the name"),
    ({"train": {"global_batch_size": 3}, "hardware": TWO}, "train.global_batch_size = 3: must be"),
    (
        {"train": {"micro_batch_size": 3}, "hardware": TWO},
        "train.micro_batch_size = 3: must divide",
    ),
    ({"hardware": {"gpus": 4, "shard_size": 3}}, "hardware.shard_size = 3: must divide"),
    (
        {"hardware": {"gpus": 2, "offload_layers": 81}},
        "hardware.offload_layers = 81: the model has 80",
    ),
    (
        {"hardware": {"gpus": 0, "offload_layers": 1}},
        "hardware.offload_layers = 1: this run is on CPUs",
    ),
    (
        {"hardware": {"gpus": 2, "nodes": 3}},
        "train.global_batch_size = 16: must be a multiple of the 6",
    ),
]


@pytest.mark.parametrize(("settings", "message"), IMPOSSIBLE)
def test_impossible_setting_is_found_without_tokens_or_machine(
    settings: dict[str, Any], message: str
) -> None:
    run = RunConfig.model_validate(settings)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        check_settings(run, UNTIED, trains_here=False)


def test_number_of_gpus_that_is_not_known_refuses_nothing() -> None:
    """A report is made anew on machines that could train none of its runs."""
    train = {"global_batch_size": 7, "micro_batch_size": 7, "optimizer": "paged_adamw"}
    check_settings(RunConfig.model_validate({"train": train}), UNTIED, trains_here=False)


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        ({"gpus": 99}, "hardware.gpus = 99: this machine shows 0"),
        ({"cpu_processes": 3}, "train.global_batch_size = 16: must be a multiple of the 3"),
    ],
)
def test_machine_that_trains_is_asked(
    hardware: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workflow.lib.system.hardware.visible_gpus", list)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        check_settings(RunConfig.model_validate({"hardware": hardware}), UNTIED, trains_here=True)
