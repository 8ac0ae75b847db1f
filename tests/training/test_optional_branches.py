"""Every family with every branch of its config switched on: clips, caps, limits, factors, biases,
norms of queries, LongRoPE beyond its limit train as the stock model, and what draws random numbers
has the same gradients with recomputation.

A field is a branch if the family's file reads it and its value in the tiny model is None, false, 0
or a factor of 1, or if it is called a limit, which small values do not reach. Sizes and names are
none: nothing says which would fit."""

import importlib
import inspect
import re
import traceback
from copy import deepcopy

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.families import FAMILIES, LOCAL_EXPERTS, LONG_ROPE, SIZES, WINDOW, tiny_model
from tests.support.family_runs import (
    attention_of,
    difference_from_stock,
    family_store,
    randomize_,
    run_family,
)
from tests.support.models import quantized
from tests.support.plans import make_plan
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.settings.config import LoraSettings, ModelConfig, RunConfig, TrainConfig
from workflow.lib.system.errors import UserError
from workflow.lib.training.startup_checks import startup_checks

FLOAT = 0.5  # of a clip, a cap, a scale: the values of tiny models lie on both sides
LIMIT = re.compile(r"limit|clip|clamp|softcap")
SCALE = re.compile(r"multiplier|scal")
DRAWN = re.compile(r"drop|jitter|noise")
# Values that nothing derives; None: no branch of a causal language model that is trained.
BY_NAME = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 3.0),
    "router_jitter_noise": 0.1,
    "input_jitter_noise": 0.1,
    **dict.fromkeys(
        (
            "attention_k_eq_v", "enable_moe_block", "is_decoder", "output_router_logits",
            "rescale_prenorm_residual", "rms_norm_eps", "tie_word_embeddings", "use_cache",
            "use_bidirectional_attention", "use_double_wide_mlp", "use_mambapy",
        )
    ),
}  # fmt: skip
MORE = {
    "phi3": {
        "rope_parameters": LONG_ROPE | {"factor": 4.0, "partial_rotary_factor": 1.0},
        "original_max_position_embeddings": 8,  # shorter than documents
    }
}
"""Branches that are no field of their own."""

OTHERS = {
    "olmo": AutoConfig.for_model("olmo", **SIZES),
    "phimoe": AutoConfig.for_model("phimoe", **SIZES, sliding_window=WINDOW, num_local_experts=6),
    "minimax_m2": AutoConfig.for_model("minimax_m2", **SIZES, **LOCAL_EXPERTS),
}
if "hyperclovax" in CONFIG_MAPPING:  # Transformers 5.17 has it not
    OTHERS["hyperclovax"] = AutoConfig.for_model("hyperclovax", **SIZES)


def tiny(family):
    return FAMILIES[family].config(family) if family in FAMILIES else deepcopy(OTHERS[family])


def branches(family):
    text = tiny(family).get_text_config()
    file = type(text).__module__.replace(".configuration_", ".modeling_")
    code = inspect.getsource(importlib.import_module(file))
    kinds = [kind for kind in type(text).__mro__ if not issubclass(PreTrainedConfig, kind)]
    told = [vars(kind).get("__annotations__", {}) for kind in kinds]
    named = {name: str(a) for annotations in told for name, a in annotations.items()}
    switches = {name: a for name, a in named.items() if "bool" in a or "float" in a}
    found = {
        name: _switched_on(text, name, a) for name, a in switches.items() if f".{name}" in code
    }
    return {n: x for n, x in found.items() if x is not None} | MORE.get(family, {})


def _switched_on(config, name, annotation):
    if name not in vars(config):  # a property, or another for each layer
        return None
    value = vars(config)[name]
    if name in BY_NAME:
        return BY_NAME.get(name)
    if value is False:
        return True
    scale = 1.0 if SCALE.search(name) else 0.0
    off = value is None or (isinstance(value, float) and value in (0.0, scale))
    limits = isinstance(value, float) and LIMIT.search(name)
    return FLOAT if limits or (off and "float" in annotation) else None


def run_branches(world, folder, families, drawn):
    """Train tiny models with all branches on, those that draw random numbers or the others; return
    what is wrong with each, nothing of a family that trains as stock."""
    found = {}
    for number, family in enumerate(families):
        chosen = {n: x for n, x in branches(family).items() if bool(DRAWN.search(n)) is drawn}
        try:
            found[family] = _looked_at(folder / family, family, chosen, world, drawn, number)
        except UserError as error:
            found[family] = f"refused: {error}"
        except Exception:
            found[family] = f"{chosen}\n{traceback.format_exc()}"
    return found


def _looked_at(place, family, chosen, world, drawn, number):
    config = tiny(family)
    text = config.get_text_config()
    quiet = {n: 0.0 for n, x in vars(text).items() if DRAWN.search(n) and isinstance(x, float)}
    for name, value in ((quiet if not drawn else {}) | chosen).items():
        setattr(text, name, value)
    quantized(tiny_model(config, place / "original"), place / "nf4")
    if drawn:
        return _steps(place / "nf4", world)
    ours = run_family(place, world, "of-1", fused=True, break_checks=False, number=number)
    return difference_from_stock(ours, place) if all(ours["checks"]) else str(ours["details"])


def _steps(base, world):
    """Recomputed layers have the gradients of others: one of the start-up checks."""
    config = RunConfig(
        lora=LoraSettings(r=3),
        train=TrainConfig(global_batch_size=4),
        model=ModelConfig(attention_dropout="family"),
    )
    model = built_model(base, config, make_plan(), world, attention=attention_of(base))
    randomize_(model.training)
    checks = startup_checks(model, family_store("packed"), Checkpoint(base), world)
    return "" if all(check.passed for check in checks) else str(checks)


SWITCHED = {family: branches(family) for family in (*FAMILIES, *OTHERS)}
# Attention's dropout alone is one for all: `tests/training/test_build.py`.
NOISY = [
    family
    for family, found in SWITCHED.items()
    if any(DRAWN.search(name) for name in found if name != "attention_dropout")
]
PLAIN = [family for family, found in SWITCHED.items() if not all(map(DRAWN.search, found))]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What is wrong with families, by whether their branches draw random numbers."""

    def made(name):
        return tmp_path_factory.mktemp(name)

    return {
        drawn: run_in_group(run_branches, made(str(drawn)), families, drawn, world_size=1)[0]
        for drawn, families in ((False, PLAIN), (True, NOISY))
    }


@pytest.mark.parametrize("family", PLAIN)
def test_branches_train_as_the_stock_model(found, family):
    assert found[False][family] == ""


@pytest.mark.parametrize("family", NOISY)
def test_random_numbers_are_the_same_in_recomputation(found, family):
    assert found[True][family] == ""
