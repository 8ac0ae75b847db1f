"""What a user is told when a run cannot work: settings that the model, the tokens or the machine
refuse.
"""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.support.decisions import decided, llama_8b, message, run_config
from tests.support.preflight_examples import cpu_machine, llama_70b, machine, token_counts
from workflow.lib.model.architecture.model_shape import Linear
from workflow.lib.planning.preflight.checks import check_gguf, check_settings, check_tokens
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.errors import UserError


def test_fixed_micro_batch_that_does_not_divide_lists_the_valid():
    text = message(train={"global_batch_size": 20, "micro_batch_size": 3})
    assert text == (
        "train.micro_batch_size = 3: must divide the 10 rows that each of 2 processes has of a "
        "step. "
        "Set it to 1, 2, 5, 10, or auto."
    )


def test_global_batch_that_processes_cannot_share_names_the_nearest():
    text = message(on=machine(processes=3), train={"global_batch_size": 16})
    assert text == (
        "train.global_batch_size = 16: must be a multiple of the 3 processes, which share its rows "
        "equally. "
        "Set it to 15 or 18, or change hardware.gpus (hardware.cpu_processes on the CPU)."
    )


def test_more_gpu_memory_than_there_is_is_refused():
    text = message(hardware={"gpu_memory_gib": 80.0})
    assert "hardware.gpu_memory_gib = 80.0: the smallest GPU has 24.00 GiB" in text


def test_unknown_lora_target_is_refused():
    text = message(lora={"target_modules": ["q_proj", "query"]})
    assert "lora.target_modules = 'query'" in text
    assert "q_proj, k_proj, v_proj" in text


def test_offloading_from_host_memory_to_host_memory_is_refused():
    with pytest.raises(
        UserError, match=r"hardware\.offload_activations = True: this run is on CPUs"
    ):
        decided(on=cpu_machine(processes=2), hardware={"offload_activations": True})


def test_saved_activations_in_float8_are_refused_for_gpus_without_it():
    old = machine(gpu_names=("NVIDIA GeForce RTX 3090",) * 2, float8=False)
    with pytest.raises(UserError, match=r"train\.saved_activations = 'float8': this GPU has no"):
        decided(llama_8b, on=old, train={"saved_activations": "float8"})


def test_activations_of_more_layers_than_there_are_cannot_be_offloaded():
    with pytest.raises(
        UserError, match=r"hardware\.offload_activations = 33: the model has 32 decoder layers"
    ):
        decided(llama_8b, hardware={"offload_activations": 33})


def test_more_layers_on_the_host_than_there_are_is_refused():
    with pytest.raises(
        UserError, match=r"hardware\.offload_layers = 33: the model has 32 decoder layers"
    ):
        decided(llama_8b, hardware={"offload_layers": 33})


def test_layers_from_host_memory_to_host_memory_are_refused():
    with pytest.raises(UserError, match=r"hardware\.offload_layers = 1: this run is on CPUs"):
        decided(on=cpu_machine(processes=2), hardware={"offload_layers": 1})


def test_float16_on_cpus_is_refused():
    with pytest.raises(
        UserError, match=r"model\.compute_dtype = 'float16': it is for GPUs.* Set it to auto"
    ):
        decided(on=cpu_machine(processes=2), model={"compute_dtype": "float16"})


def test_trained_embedding_on_the_host_is_refused():
    with pytest.raises(
        UserError,
        match=r"hardware\.offload_embedding = True: lora\.modules_to_save trains the embedding.* "
        r"or take embed_tokens out of lora\.modules_to_save",
    ):
        decided(lora={"modules_to_save": ["embed_tokens"]}, hardware={"offload_embedding": True})


def test_modules_of_a_tied_model_are_refused():
    with pytest.raises(
        UserError, match=r"lora\.modules_to_save = \['lm_head'\]: this model ties its output head"
    ):
        decided(replace(llama_8b, tied_embeddings=True), lora={"modules_to_save": ["lm_head"]})


def test_sequence_longer_than_the_model_is_refused():
    shape = replace(llama_8b, max_position_embeddings=1024)
    with pytest.raises(
        UserError, match=r"data\.seq_len = 2048: the model's max_position_embeddings is 1024"
    ):
        check_tokens(token_counts(seq_len=2048), run_config(), shape)


def test_tokens_of_another_length_are_refused():
    with pytest.raises(UserError, match="packed into rows of 61"):
        check_tokens(token_counts(), run_config(), llama_8b)


def test_vocabulary_larger_than_the_embedding_is_refused():
    tokens = token_counts(seq_len=2048, vocab_size=128257)
    with pytest.raises(UserError, match="128257 tokens, the model's embedding 128256"):
        check_tokens(tokens, run_config(), llama_8b)


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
def test_impossible_setting_is_found_without_tokens_or_machine(settings, message):
    run = RunConfig.model_validate(settings)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        check_settings(run, UNTIED, trains_here=False)


def test_number_of_gpus_that_is_not_known_refuses_nothing():
    """A report is made anew on machines that could train none of its runs."""
    train = {"global_batch_size": 7, "micro_batch_size": 7}
    check_settings(RunConfig.model_validate({"train": train}), UNTIED, trains_here=False)


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        ({"gpus": 99}, "hardware.gpus = 99: this machine shows 0"),
        ({"cpu_processes": 3}, "train.global_batch_size = 16: must be a multiple of the 3"),
    ],
)
def test_machine_that_trains_is_asked(hardware, message, monkeypatch):
    monkeypatch.setattr("workflow.lib.system.hardware.visible_gpus", list)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        check_settings(RunConfig.model_validate({"hardware": hardware}), UNTIED, trains_here=True)


def test_gguf_of_an_adapter_on_experts_is_refused_by_name():
    stack = Linear("mlp.experts.down_proj", 8 * 4096, 512, 8)
    dense = llama_8b.kinds[0]
    layer = replace(dense, linears=(*dense.linears[:4], stack), top_k=2)
    shape = replace(llama_8b, kinds=(layer,))
    adapter = {"gguf": ["q8_0"], "gguf_of": ["adapter"]}
    with pytest.raises(UserError, match=r"export\.gguf_of = \['adapter'\]: .* experts \(.*experts"):
        check_gguf(run_config(export=adapter, lora={"target_modules": ["down_proj"]}), shape)
    check_gguf(run_config(export=adapter, lora={"target_modules": ["q_proj"]}), shape)
    merged = {"gguf": ["q8_0"], "merged": True}
    check_gguf(run_config(export=merged, lora={"target_modules": ["down_proj"]}), shape)
