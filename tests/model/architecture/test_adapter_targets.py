"""Which linears get an adapter of which rank and scale: PEFT's own rules, and what it would pass
over in silence."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from workflow.lib.model.architecture.adapter_targets import (
    WholeModules,
    adapter_ranks,
    adapter_scale,
    modules_to_save,
)
from workflow.lib.settings.config import LoraSettings
from workflow.lib.system import limits
from workflow.lib.system.errors import UserError

SETTINGS: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ("q_proj", "down_proj")},
    "ends of paths": {"target_modules": ("self_attn.v_proj", "layers.1.mlp.up_proj")},
    "expression": {"target_modules": r"model\.layers\.[02]\..*_proj"},
    "everything": {"target_modules": "all-linear"},
    "ranks": {"rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.\w+": 3, "up_proj": 5}},
    "ranks and alphas": {
        "rank_pattern": {"q_proj": 7},
        "alpha_pattern": {"mlp.*": 11.0, "q_proj": 5.0},
    },
    "rank-stabilized": {"rank_pattern": {"q_proj": 7}, "use_rslora": True},
}


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=1, vocab_size=3
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def linears(model):
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return [name for name in linears if name != "lm_head"]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_ranks_and_scales_are_those_that_peft_gives(model, settings):
    lora = LoraSettings(r=4, alpha=6.0, **settings)
    targets = lora.target_modules
    config = LoraConfig(
        r=4,
        lora_alpha=6.0,
        use_rslora=lora.use_rslora,
        task_type="CAUSAL_LM",  # type: ignore[arg-type]
        target_modules=targets if isinstance(targets, str) else list(targets),
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
    )
    paths = linears(model)
    with torch.device("meta"):
        adapted = get_peft_model(model, config)  # type: ignore[arg-type]
    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in adapted.named_modules()
        if isinstance(layer, LoraLayer)
    }
    ranks = adapter_ranks(lora, linears=paths)
    assert ranks == {path: layer.r["default"] for path, layer in layers.items()}
    assert 0 < len(ranks) <= 21
    stored = config.to_dict()
    for path, layer in layers.items():
        assert adapter_scale(stored, path) == pytest.approx(layer.scaling["default"], rel=1e-12)
    adapted.unload()


PATHS = [f"model.layers.{n}.self_attn.{k}_proj" for n in range(2) for k in "qkv"]
NO_NAME = "has this name; it has q_proj, k_proj, v_proj. Name some of these, or all-linear."
NO_END = f"is the end of no adapted layer's path, such as {PATHS[0]}. Correct or remove it."
NO_MATCH: list[tuple[str, Any, str]] = [
    *(
        ("target_modules", ("q_proj", x), f" = {x!r}: no linear layer of the model {NO_NAME}")
        for x in ("qkv_proj", "lm_head", "embed_tokens", "mlp.q_proj")
    ),
    ("target_modules", "q_proj", "matches the whole path of no linear layer; a path is model.lay"),
    ("rank_pattern", {"q_proj": 4, "mlp": 4}, f": 'mlp' {NO_END}"),
    ("alpha_pattern", {"mlp": 4.0}, f": 'mlp' {NO_END}"),
]


@pytest.mark.parametrize(("setting", "value", "says"), NO_MATCH, ids=str)
def test_setting_that_matches_no_linear_is_refused(setting, value, says):
    with pytest.raises(UserError, match=rf"^lora\.{setting}") as refused:
        adapter_ranks(LoraSettings(**{setting: value}), linears=PATHS)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": "([a-z_.0-9]+)+!"}, {"rank_pattern": {"([a-z_.0-9]+)+!": 4}}],
    ids=["target_modules", "rank_pattern"],
)
def test_expression_that_matches_for_ever_is_stopped(settings, monkeypatch):
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.05)
    with pytest.raises(
        UserError, match=r"lora\.target_modules, .* more than 0\.05 seconds .*\(a\+\)\+"
    ):
        adapter_ranks(LoraSettings(**settings), linears=["model.layers.0.self_attn.q_proj"])


UNTIED = WholeModules(embedding="gpt_neox.embed_in", head="embed_out", tied=False)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ((), set()),
        (("embed_out",), {"embed_out"}),
        (("embed_in", "embed_out"), {"embed_out", "gpt_neox.embed_in"}),
        (("gpt_neox.embed_in",), {"gpt_neox.embed_in"}),
    ],
)
def test_modules_are_found_by_the_end_of_their_path(names, chosen):
    lora = LoraSettings(modules_to_save=names)
    assert modules_to_save(lora, UNTIED) == chosen


ROUTERS = ("model.layers.0.mlp.gate", "model.layers.3.mlp.gate")
MIXTURE = WholeModules("model.embed_tokens", "lm_head", tied=True, routers=ROUTERS)


def test_routers_are_found_by_the_end_of_their_path_in_a_tied_model_too():
    assert modules_to_save(LoraSettings(modules_to_save=("mlp.gate",)), MIXTURE) == {*ROUTERS}
    one = LoraSettings(modules_to_save=("layers.3.mlp.gate",))
    assert modules_to_save(one, MIXTURE) == {ROUTERS[1]}


OF_TABLES = "only .* in this model they are embed_out and embed_in. Name embed_out"
NOT_WHOLE: list[tuple[WholeModules, str, str]] = [
    *((UNTIED, x, OF_TABLES) for x in ("lm_head", "norm", "out", "neox.embed_in")),
    (replace(UNTIED, tied=True), "embed_out", "ties its output head to its input embedding"),
    (MIXTURE, "router", "and the routers of a mixture, .* lm_head, embed_tokens "),
    (
        MIXTURE,
        "gate",
        f"{ROUTERS[0].replace('gate', 'shared_expert_gate')} ends so too.*: mlp.gate",
    ),
]


@pytest.mark.parametrize(("offered", "name", "says"), NOT_WHOLE, ids=[x[1] for x in NOT_WHOLE])
def test_module_that_cannot_be_trained_whole_is_refused(offered, name, says):
    lora = LoraSettings(modules_to_save=(name,))
    with pytest.raises(UserError, match=says) as refused:
        modules_to_save(lora, offered, others=["model.layers.0.mlp.shared_expert_gate"])
    assert f"{name!r}" in str(refused.value)


EXPERTS = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]
BESIDE = [f"model.layers.0.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dropout": 0.1}, r"lora\.dropout = 0\.1: .*mlp\.experts\).*no dropout .*Remove it"),
        ({"use_dora": True}, r"lora\.use_dora = true: .* no DoRA for the weights of experts"),
        (
            {"target_modules": ("gate_proj", "up_proj", "down_proj")},
            r"down_proj means the experts .* half of each .* Name gate_up_proj",
        ),
        (
            {"target_modules": r".*\.(gate_proj|up_proj|down_proj)"},
            r"down_proj means the experts .* half of each .* Name gate_up_proj",
        ),
    ],
    ids=["dropout", "DoRA", "half an expert", "half an expert by an expression"],
)
def test_experts_are_refused_what_they_cannot_have(settings, says):
    with pytest.raises(UserError, match=says):
        adapter_ranks(LoraSettings(**settings), linears=[*EXPERTS, *BESIDE], stacks=EXPERTS)


def test_settings_that_experts_cannot_have_reach_the_other_linears():
    lora = LoraSettings(target_modules=("shared_experts.down_proj", "gate_proj"), dropout=0.1)
    ranks = adapter_ranks(lora, linears=[*EXPERTS, *BESIDE], stacks=EXPERTS)
    assert ranks == {BESIDE[0]: 16, BESIDE[2]: 16}


def test_experts_without_a_gate_are_named_as_their_weights_are():
    """Nemotron H's `up_proj` is a whole weight of its experts."""
    stacks = [f"model.layers.1.mixer.experts.{name}_proj" for name in ("up", "down")]
    beside = [f"model.layers.1.mixer.shared_experts.{name}_proj" for name in ("up", "down")]
    lora = LoraSettings(target_modules=("up_proj", "down_proj"))
    linears = [*stacks, *beside]
    assert adapter_ranks(lora, linears=linears, stacks=stacks) == dict.fromkeys(linears, 16)


ATTENTION = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        (r".*\.(q_proj|experts\.3\.down_proj)", "down_proj"),
        (r".*\.q_proj|.*\.experts\.\d+\..*", "experts"),
        (r".*self_attn.*|.*\.mlp\.(gate|up|down)_proj", "mlp"),
        (r".*\.(q_proj|w1|w2)", "w1"),
    ],
)
def test_expression_that_names_experts_and_matches_none_is_refused(expression, named):
    lora = LoraSettings(target_modules=expression)
    says = rf"names {named}, but .* no expert; a path is {EXPERTS[0]}\. Mend .* are all experts"
    with pytest.raises(UserError, match=says):
        adapter_ranks(lora, linears=[*ATTENTION, *EXPERTS], stacks=EXPERTS)


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        (r".*\.self_attn\.[qkvo]_proj", ATTENTION),
        (r"^(?!.*(mlp|experts)).*_proj", ATTENTION),
        (r".*\.(?<!experts\.)(q|k|v|o)_proj", ATTENTION),
        (r".*\.shared_experts\.(gate_proj|up_proj|down_proj)", BESIDE),
        (r".*\.(q_proj|experts\.\w+)", [ATTENTION[0], *EXPERTS]),
    ],
)
def test_expression_that_means_no_expert_or_matches_them_is_taken(expression, chosen):
    lora = LoraSettings(target_modules=expression)
    linears = [*ATTENTION, *EXPERTS, *BESIDE]
    assert [*adapter_ranks(lora, linears=linears, stacks=EXPERTS)] == chosen
