"""Parts of a decoder layer that are replaced by fused operations, found by what they compute, not
by the family's name.

A norm, attention or feed-forward is replaced only if its class, tried on small random values, gives
what the fused one
gives. Fused ones keep less for backward: an RMS norm its input in the compute type (not an fp32
copy), a gated feed-forward two wide tensors less. The parameters keep their names. Only rounding
differs.
"""

from collections import Counter

import torch
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.model.decoder_layers import decoder_layers
from workflow.lib.model.fused_attention import as_fused_attention
from workflow.lib.model.fused_feed_forward import ACTIVATIONS, LINEARS, FusedFeedForward
from workflow.lib.model.layers.rms_norm import RmsNorm

WIDTH = 8  # of the values that a class is tried on


def fuse_layers_(model: PreTrainedModel) -> Counter[str]:
    """Replace what can be fused in every decoder layer; return how many modules of each kind
    (`norms`, `attentions`, `feed_forwards`).
    """
    replaced: Counter[str] = Counter()
    for layer in decoder_layers(model):
        replaced += fuse_layer_(layer)
    return replaced


def fuse_layer_(layer: nn.Module) -> Counter[str]:
    """`fuse_layers_` of one decoder layer."""
    replaced: Counter[str] = Counter()
    for path, module in list(layer.named_modules()):
        parent, _, name = path.rpartition(".")
        if (norm := _as_rms_norm(module)) is not None:
            setattr(layer.get_submodule(parent), name, norm)
            replaced["norms"] += 1
        elif (attention := as_fused_attention(module)) is not None:
            setattr(layer.get_submodule(parent), name, attention)
            replaced["attentions"] += 1
        elif (activation := _gate_activation(module)) is not None:
            feed_forward = FusedFeedForward(module, activation=activation)
            setattr(layer.get_submodule(parent), name, feed_forward)
            replaced["feed_forwards"] += 1
    return replaced


def _as_rms_norm(module: nn.Module) -> RmsNorm | None:
    """Return the fused norm of a module that is an RMS norm with a weight w, times w or 1 + w; None
    of any other.
    """
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or list(module.children()) or not isinstance(eps, float):
        return None
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, WIDTH, generator=draw)
    stand_in = type(module).__new__(
        type(module)
    )  # with the class's methods, which its forward calls
    nn.Module.__init__(stand_in)
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "training":
            setattr(stand_in, name, value)
    weight = stand_in.weight = nn.Parameter(torch.rand(WIDTH, generator=draw) + 0.5)
    for centered in (False, True):
        if _same(module, stand_in, x, RmsNorm(weight, eps=eps, centered=centered)(x)):
            return RmsNorm(module.get_parameter("weight"), eps=eps, centered=centered)
    return None


def _gate_activation(module: nn.Module) -> str | None:
    """Return the activation of a module that is a gated feed-forward, None of any other."""
    activation = getattr(module, "act_fn", None)
    children = {name for name, _ in module.named_children()}
    if not children.issuperset(LINEARS) or activation is None:
        return None
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, WIDTH, generator=draw)
    stand_in = nn.Module()
    stand_in.act_fn = activation
    gate, up, down = (nn.Linear(WIDTH, WIDTH) for _ in LINEARS)
    for name, linear in zip(LINEARS, (gate, up, down), strict=True):
        linear.weight.data = torch.randn(WIDTH, WIDTH, generator=draw)
        setattr(stand_in, name, linear)
    for name, (function, _) in ACTIVATIONS.items():
        expected = down(function(gate(x)) * up(x))
        if _same(module, stand_in, x, expected):
            return name
    return None


@torch.no_grad()
def _same(module: nn.Module, stand_in: nn.Module, x: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the forward of `module`'s class gives the expected values with the attributes of
    `stand_in`.
    """
    try:
        output = type(module).forward(stand_in, x)
    except (AttributeError, TypeError, RuntimeError):
        return False
    return isinstance(output, torch.Tensor) and torch.allclose(
        output, expected, atol=1e-4, rtol=1e-4
    )
