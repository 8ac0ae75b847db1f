"""What settings, model and machine give a plan to start from: budget, data types, divisors, and
what lies on the host."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from tests.support.decisions import decided, llama_8b, run_config
from tests.support.families import FAMILIES
from tests.support.other_decoders import MIXTURES, config_of
from tests.support.preflight_examples import llama_shape, machine, setup
from tests.support.refusals import refusal
from workflow.lib.checkpoints.files.attention_needs import attention_needs as config_needs
from workflow.lib.kernels.attention.attention_choice import AttentionNeeds
from workflow.lib.model.architecture.shipped_shapes import known_config, known_models, known_shape
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.preflight.budget import Budget, budget, host_bytes
from workflow.lib.planning.preflight.planning_inputs import (
    attention_needs,
    compute_dtype,
    divisors,
    micro_batch_sizes,
    plan_from_settings,
    rows_per_process,
    shard_size,
    target_ranks,
    training_attention,
)
from workflow.lib.settings.config import HardwareConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.units import GIB


def test_margin_slack_and_context_count():
    limits = Budget(1000, outside_allocator_bytes=100, margin_bytes=50, host_capacity_bytes=0)
    assert limits.holds(825)  # 825 + 24 of slack (3%) + 150 = 999
    assert not limits.holds(827)


def test_global_batch_smaller_than_the_processes_names_only_what_is_possible():
    with pytest.raises(UserError, match="Set it to 5, or"):
        rows_per_process(3, processes=5)


OLD = {"bfloat16": False, "gpu_names": ("Tesla V100-SXM2-32GB",) * 2, "gpu_bytes": 32 * GIB}


def test_gpus_without_bfloat16_compute_in_float16_and_without_flash_attention():
    run = run_config()
    assert compute_dtype(run_config().model, machine(**OLD)) == "float16"
    found = plan_from_settings(run, llama_8b, machine(**OLD))
    assert (found.compute_bytes, found.attention) == (2, "sdpa")


@pytest.mark.parametrize(
    ("quantize", "dtype"),
    [
        ({}, "float8"),
        ({"block_size": 512}, "compute_dtype"),
        ({"block_size": 512, "keep": ("down_proj",)}, "float8"),
        ({"block_size": 512, "method": "none"}, "float8"),
    ],
    ids=str,
)
def test_matmuls_are_in_8_bits_by_themselves_only_if_all_weights_can_be(quantize, dtype):
    """Rows of 11,008 weights are no whole blocks of 512. What is asked for is refused at once."""
    gpus = machine(float8=True)
    shape = llama_shape(
        layers=2, hidden=4096, feed_forward=11008, heads=32, kv_heads=32, vocab=32000
    )
    run = run_config(quantize=quantize, train={"matmul_dtype": "auto"})
    assert plan_from_settings(run, shape, gpus).matmul_dtype == dtype
    asked = run_config(quantize=quantize, train={"matmul_dtype": "float8"})
    if dtype == "float8":
        assert plan_from_settings(asked, shape, gpus).matmul_dtype == dtype
    else:
        message = r"down_proj has the shape \(4096, 11008\), and float8 needs rows of whole blocks"
        with pytest.raises(UserError, match=message):
            plan_from_settings(asked, shape, gpus)


def test_bfloat16_on_gpus_without_it_is_refused():
    with pytest.raises(
        UserError, match=r"model\.compute_dtype = 'bfloat16': this GPU .* has no bfloat16"
    ):
        decided(on=machine(**OLD), model={"compute_dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("setting", "device", "installed", "kind"),
    [
        ("auto", "cuda", True, "flash"),
        ("auto", "cuda", False, "flash"),
        ("varlen", "cuda", False, "flash"),
        ("flex", "cuda", False, "flex"),
        ("auto", "cpu", True, "sdpa"),
        ("sdpa", "cuda", True, "sdpa"),
        ("eager", "cuda", True, "eager"),
        ("flash_attention_3", "cuda", False, "flash"),
    ],
)
def test_attention_is_what_the_engine_will_use(setting, device, installed, kind):
    model = run_config(model={"attention": setting}).model
    on = replace(machine(device=device), flash_attention=installed)
    chosen = training_attention(model, on, AttentionNeeds())
    assert setup(attention=chosen.name).attention_kind == kind


@pytest.mark.parametrize(
    ("on", "kind"),
    [
        (machine(), "flash"),
        (replace(machine(), flash_attention=False), "flex"),
        (machine(device="cpu"), "eager"),
    ],
)
def test_soft_capped_scores_are_whole_on_cpus_alone(on, kind):
    chosen = training_attention(run_config().model, on, AttentionNeeds(softcap=True))
    assert setup(attention=chosen.name).attention_kind == kind


def test_needs_of_families_are_what_training_reads_from_their_config():
    """From the config.json that Transformers writes for the base."""
    wrong = []
    for family in (*FAMILIES, *MIXTURES):
        content = config_of(family)
        saved = AutoConfig.for_model(**content).to_dict()
        described = describe_config(content, origin=Path("config.json"))
        if attention_needs(described) != config_needs(saved):
            wrong.append(family)
    assert wrong == []


def test_shipped_models_get_the_attention_that_training_gives_them():
    wrong = []
    for name in sorted(set(known_models().values())):
        config, shape = known_config(name), known_shape(name)
        if attention_needs(shape) != config_needs(AutoConfig.for_model(**config).to_dict()):
            wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize(("asked", "name"), [(0, "varlen"), ("family", "sdpa")])
def test_attention_weights_are_dropped_only_where_the_family_is_asked_for(asked, name):
    needs = AttentionNeeds(dropout=0.1)
    model = run_config(model={"attention_dropout": asked}).model
    on = replace(machine(), flash_attention=False)
    assert training_attention(model, on, needs).name == name
    assert bool(needs.dropout_note(model.attention_dropout)) == (asked == 0)


@pytest.mark.parametrize(
    ("model", "needs", "lack"),
    [
        (
            {"attention": "varlen", "attention_dropout": "family"},
            AttentionNeeds(dropout=0.1),
            r"it cannot drop attention weights.* attention_dropout is 0\.1",
        ),
        ({"attention": "sdpa"}, AttentionNeeds(softcap=True), "it ignores the soft-capping"),
        ({"attention": "flash_attention_2"}, AttentionNeeds(sinks=True), "attention sinks"),
    ],
)
def test_attention_that_cannot_compute_the_models_is_refused_before_a_machine_is_asked(
    model, needs, lack
):
    with pytest.raises(UserError, match=lack):
        training_attention(run_config(model=model).model, machine(), needs)


def test_host_holds_the_embedding_once_and_the_rows_of_each_process():
    chosen = setup(micro_batch_size=4)
    there, away = (
        host_bytes(
            llama_8b, replace(chosen, offload_embedding=x), machine(), Peaks({"forward": {}})
        )
        for x in (False, True)
    )
    assert away - there == 2 * 4 * 2048 * 4096 * 2
    assert there > 2 * llama_8b.vocab_size * 4096


def test_plan_follows_the_settings():
    run = run_config(
        lora={"r": 7, "dropout": 0.1, "target_modules": ["v_proj"]},
        quantize={"block_size": 128, "double_quant": False},
        hardware={"reshard_after_forward": False},
    )
    found = plan_from_settings(run, llama_8b, machine())
    expected = setup(
        rank=7, dropout=0.1, targets=("v_proj",), block_size=128, double_quant=False,
        reshard_after_forward=False, accumulation_steps=8, fused_layers=True,
        offload_embedding=True, cuda_graphs=True, fused_loss=True, attention="varlen",
    )  # fmt: skip
    assert found == expected


def test_rank_of_a_name_is_the_largest_of_its_layers():
    run = run_config(
        lora={
            "r": 8,
            "use_dora": True,
            "rank_pattern": {r"layers\.3\.self_attn\.q_proj": 64, "v_proj": 4},
        }
    )
    found = plan_from_settings(run, llama_8b, machine())
    assert (found.rank, found.ranks, found.dora) == (8, {"q_proj": 64, "v_proj": 4}, True)
    assert [found.rank_of(name) for name in ("q_proj", "k_proj", "v_proj")] == [64, 8, 4]


def test_groups_that_leave_a_process_over_are_refused():
    assert refusal(shard_size, 4, processes=6) == (
        "hardware.shard_size = 4: must divide the 6 processes of the run into equal groups. Set it "
        "to 2, 3, 6, or auto."
    )


@given(st.integers(1, 100_000))
def test_divisors_are_all_and_in_order(number):
    found = divisors(number)
    assert found == sorted(set(found))
    assert len(found) == sum(1 for d in range(1, number + 1) if number % d == 0)


def test_auto_considers_every_divisor():
    assert micro_batch_sizes("auto", rows=22, processes=3) == [1, 2, 11, 22]


def test_context_is_what_was_measured_outside_the_allocator():
    assert budget(HardwareConfig(), machine()).outside_allocator_bytes == int(1.58 * GIB)
    assert budget(HardwareConfig(), machine(processes=1)).outside_allocator_bytes == int(0.76 * GIB)


def test_dropout_on_experts_is_refused_before_training():
    shape = describe_config(config_of("qwen3_moe"), origin=Path("config.json"))
    with pytest.raises(UserError, match=r"lora\.dropout = 0\.1: the experts of this model"):
        target_ranks(run_config(lora={"dropout": 0.1}), shape)
    names = ["q_proj", "o_proj"]
    others = target_ranks(run_config(lora={"dropout": 0.1, "target_modules": names}), shape)
    assert {path.rpartition(".")[2] for path in others} == {*names}


def test_processes_that_share_rows_have_slices_of_more_rows():
    """Of four processes two groups: 6 rows each in place of 3, of 683 tokens in place of 2,048."""
    train = {"global_batch_size": 12}
    found = [
        plan_from_settings(
            run_config(hardware={"context_parallel": size}, train=train, data={"seq_len": 2048}),
            llama_8b,
            machine(processes=3 * size),
        )
        for size in (1, 3)
    ]
    assert [(x.row_groups, x.accumulation_steps, x.tokens) for x in found] == [
        (3, 4, 2048),
        (3, 4, 683),
    ]
    assert found[1].graph_obstacle.startswith("hardware.context_parallel = 3:")


def test_processes_that_share_rows_exchange_heads_on_a_cpu_too():
    run = run_config(hardware={"context_parallel": 2})
    found = plan_from_settings(run, llama_8b, machine(device="cpu", gpu_bytes=None))
    assert found.attention == "flex"
