"""Scale and soft cap of a family's logits, found by trying its class."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from tests.support.families import FAMILIES, SIZES
from workflow.lib.checkpoints.meta_model import build_config_on_meta
from workflow.lib.model.loss.tried_head import tried_head
from workflow.lib.system.errors import UserError

CAP: dict[str, Any] = {"final_logit_softcapping": 30.0}
THIRD = float(torch.tensor(1 / 3))
FORMS: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "llama": ({}, 1.0, None),
    "phi": ({}, 1.0, None),  # a bias
    "cohere": ({"logit_scale": 0.0625}, 0.0625, None),
    "falcon_h1": ({"lm_head_multiplier": 0.0625}, 0.0625, None),
    "granite": ({"logits_scaling": 3.0}, THIRD, None),  # divides by it
    "hyperclovax": ({"logits_scaling": 3.0}, 3.0, None),  # multiplies by it
    "minicpm3": ({"dim_model_base": 12}, 0.25, None),  # divides the states by 48 / 12
    "nanochat": ({}, 1.0, 15.0),  # says so in its code alone
    "gemma2": (CAP, 1.0, 30.0),
    "gemma3": (CAP, 1.0, None),  # its class for several media leaves the cap out
    "gemma4": (CAP, 1.0, 30.0),
}


def on_meta(family, **changes):
    config = FAMILIES[family].config(family) if family in FAMILIES else None
    config = deepcopy(config) or AutoConfig.for_model(family, **SIZES)
    config.get_text_config().update(changes)
    return build_config_on_meta(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", [x for x in FORMS if x in CONFIG_MAPPING])
def test_scale_and_cap_are_those_of_the_familys_class(family):
    changes, *form = FORMS[family]
    assert [*tried_head(on_meta(family, **changes)).form] == form


CHANGES = {
    "clamp": lambda logits: logits.clamp(max=9.0),
    "shift": lambda logits: logits + 1.0,
    "order": lambda logits: logits.sort().values,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_logits_are_refused(change):
    model = on_meta("llama")
    kind: Any = type(model)

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        made = kind.forward(self, *args, **options)
        made.logits = change(made.logits)
        return made

    model.__class__ = type("Changed", (kind,), {"forward": forward})
    with pytest.raises(UserError, match="Changed is not supported: it computes logits otherwise"):
        tried_head(model)


def test_factor_of_the_states_is_refused_if_the_head_has_a_bias():
    """It would not multiply the bias, as ours does."""
    model: Any = on_meta("phi")
    model.lm_head.register_forward_pre_hook(lambda _, given: (given[0] / 2,))
    with pytest.raises(UserError, match="it computes logits otherwise"):
        tried_head(model)
