"""Feed-forwards are found by what they compute. Their values and gradients: `tests/training`."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.support.families import FAMILIES, FamilyCase
from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.model.fused_feed_forward import Form, FusedFeedForward
from workflow.lib.model.fusion.fuse_layers import feed_forward_form

PROJECTIONS = Form(("gate_proj", "up_proj"), "down_proj", "silu")
FORMS = {
    "llama": PROJECTIONS,
    "gemma": PROJECTIONS._replace(activation="gelu_tanh"),
    "phi3": Form(("gate_up_proj",), "down_proj", "silu"),
    "glm4": Form(("gate_up_proj",), "down_proj", "silu"),
    "lfm2": Form(("w1", "w3"), "w2", "silu"),
    "falcon_h1": PROJECTIONS._replace(gate_multiplier=0.7, output_multiplier=0.3),
    "seed_oss": PROJECTIONS._replace(dropout=0.1),
    "arcee": None,
    "starcoder2": None,
}


# The tiny models of other tests have no dropout, which stock models would draw in another order.
CASES = FAMILIES | {"seed_oss": FamilyCase("dropout of the output", {"residual_dropout": 0.1})}


@pytest.mark.parametrize("family", FORMS)
def test_form_is_that_of_the_family(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CASES[family].config(family))
    state = torch.get_rng_state()
    modules = decoder_layers(model)[0].modules()
    forms = [form for module in modules if (form := feed_forward_form(module)) is not None]
    assert forms == ([] if FORMS[family] is None else [FORMS[family]])
    assert torch.equal(torch.get_rng_state(), state), "what a run draws does not depend on trying"


class Gated(nn.Module):
    """A gated feed-forward whose linears have names of their own."""

    def __init__(self, *, wide: int = 80) -> None:
        super().__init__()
        self.out, self.second, self.first = (
            nn.Linear(*sizes) for sizes in ((wide, 48), (48, wide), (48, wide))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(nn.functional.silu(self.first(x)) * self.second(x))


@pytest.mark.parametrize("wide", [80, 48], ids=["wider", "as wide as the model"])
def test_linears_are_told_apart_by_what_they_do(wide):
    assert feed_forward_form(Gated(wide=wide)) == Form(("first", "second"), "out", "silu")


class ExactGelu(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(nn.functional.gelu(self.first(x)) * self.second(x))


class Optional(Gated):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * super().forward(x)


class Residual(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class DroppedGate(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = nn.functional.dropout(self.first(x), 0.5, self.training)
        return self.out(nn.functional.silu(first) * self.second(x))


class UpFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(48, 160), nn.Linear(80, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.both(x).chunk(2, dim=-1)
        return self.out(nn.functional.silu(gate) * up)


@pytest.mark.parametrize("kind", [ExactGelu, Optional, Residual, DroppedGate, UpFirst])
def test_what_computes_a_little_else_is_left_alone(kind):
    assert feed_forward_form(kind()) is None


def test_output_is_dropped_in_training_alone():
    module = Gated()
    fused = FusedFeedForward(module, form=Form(("first", "second"), "out", "silu", dropout=0.5))
    x = torch.randn(200, 48)
    exact = module(x)
    torch.testing.assert_close(fused.eval()(x), exact)
    dropped = fused.train()(x)
    kept = dropped != 0
    assert 0.4 < float(kept.float().mean()) < 0.6
    torch.testing.assert_close(dropped[kept], 2 * exact[kept])
