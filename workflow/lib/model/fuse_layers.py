"""Parts of a decoder layer that are replaced by fused operations, found by what they compute, not
by the family's name.

A norm, attention or feed-forward is replaced only if its class, tried on small random values
(`stand_ins`), gives what the fused one gives. Fused ones keep less for backward: an RMS norm its
input in the compute type (not an fp32 copy), a gated feed-forward two wide tensors less. The
parameters keep their names. Only rounding differs.
"""

from collections import Counter

import torch
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.model.decoder_layers import decoder_layers
from workflow.lib.model.feed_forward_forms import feed_forward_form
from workflow.lib.model.fused_attention import as_fused_attention
from workflow.lib.model.fused_feed_forward import FusedFeedForward
from workflow.lib.model.layers.rms_norm import RmsNorm
from workflow.lib.model.stand_ins import stand_in_for, tried

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
        elif (form := feed_forward_form(module)) is not None:
            feed_forward = FusedFeedForward(module, form=form)
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
    stand_in = stand_in_for(module)
    weight = stand_in.weight = nn.Parameter(torch.rand(WIDTH, generator=draw) + 0.5)
    output = tried(stand_in, x)
    if output is None:
        return None
    for centered in (False, True):
        expected = RmsNorm(weight, eps=eps, centered=centered)(x)
        if output.shape == x.shape and torch.allclose(output, expected, atol=1e-4, rtol=1e-4):
            return RmsNorm(module.get_parameter("weight"), eps=eps, centered=centered)
    return None
