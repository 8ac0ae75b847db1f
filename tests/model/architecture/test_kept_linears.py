"""Which linears stay in 16 bits, by the entries of `quantize.keep`."""

import pytest

from workflow.lib.model.architecture.kept_linears import (
    checked_linears,
    exact_patterns,
    kept_linears,
)
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import UserError

PATHS = [
    f"model.layers.{layer}.{name}"
    for layer in (1, 10, 11)
    for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.experts.down_proj")
]


@pytest.mark.parametrize(
    ("entry", "ends"),
    [
        ("q_proj", ["1.self_attn.q_proj", "10.self_attn.q_proj", "11.self_attn.q_proj"]),
        ("proj", []),
        ("mlp.down_proj", ["1.mlp.down_proj", "10.mlp.down_proj", "11.mlp.down_proj"]),
        ("experts", [f"{layer}.mlp.experts.down_proj" for layer in (1, 10, 11)]),
        ("layers.1", [path.removeprefix("model.layers.") for path in PATHS[:3]]),
        (r"layers\.(10|11)\.self_attn", ["10.self_attn.q_proj", "11.self_attn.q_proj"]),
        ("q_proj|self_attn", ["1.self_attn.q_proj", "10.self_attn.q_proj", "11.self_attn.q_proj"]),
    ],
)
def test_entry_keeps_what_has_it_among_the_parts_of_its_path(entry, ends):
    assert kept_linears([entry], PATHS) == {f"model.layers.{end}" for end in ends}


def test_method_none_keeps_all():
    assert checked_linears(QuantizeConfig(method="none"), PATHS) == {*PATHS}


def test_entry_that_keeps_nothing_is_refused_with_the_names():
    with pytest.raises(UserError) as caught:
        checked_linears(QuantizeConfig(keep=("q_proj", "up_proj")), PATHS)
    message = str(caught.value)
    assert "quantize.keep" in message
    assert "up_proj" in message
    assert "down_proj, q_proj" in message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "none", "keep": ("q_proj",)}, "keeps all linears in 16 bits"),
        ({"keep": ("q_(proj",)}, "is no regular expression"),
        ({"keep": ("auto", "q_proj")}, "auto decides the bits of every linear"),
        ({"keep": "auto", "method": "none"}, "keep = auto: method = none keeps all linears"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        QuantizeConfig(**settings)


def test_expressions_of_chosen_paths_match_these_alone():
    chosen = {PATHS[0], PATHS[3], PATHS[-1]}
    longer = [f"{path}_proj" for path in PATHS] + [
        path.replace("layers.", "layers.1") for path in PATHS
    ]
    patterns = exact_patterns(chosen)
    assert kept_linears(patterns, [*PATHS, *longer]) == chosen
    every = exact_patterns(PATHS)
    assert kept_linears(every, PATHS) == {*PATHS}
    assert len(every) < len(PATHS)
