"""Parts of a decoder layer that are replaced by fused operations, found by what they compute.

A module is replaced only if its class, tried on random values of all magnitudes (`tried_classes`),
gives what the fused one gives. A norm keeps its input in the compute dtype, a gated feed-forward
two wide tensors less. Attention runs by the family's code with one node for queries, keys and
values (`shared_input`) and one operation to rotate (`rotary_functions`); recurrences are matmuls of
chunks (`recurrence_functions`). Parameters keep their names; only rounding differs."""

import inspect
from collections import Counter
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.kernels.rows.gated_norm import GatedNorm, by_torch
from workflow.lib.model.decoder_layers import decoder_layers
from workflow.lib.model.fused_feed_forward import FusedFeedForward
from workflow.lib.model.fusion.fused_attention import as_fused_attention
from workflow.lib.model.layers.fused_norm import FusedNorm
from workflow.lib.model.layers.lora_linear import FusedLoraLinear
from workflow.lib.model.layers.shared_input import share_input_
from workflow.lib.model.tried_classes.feed_forward_forms import feed_forward_form
from workflow.lib.model.tried_classes.magnitudes import agree, magnitudes
from workflow.lib.model.tried_classes.recurrence_functions import recur_by_ours_
from workflow.lib.model.tried_classes.rotary_functions import rotate_by_kernel_
from workflow.lib.model.tried_classes.stand_ins import stand_in_for, takes_one_tensor, tried

TOLERANCE = 1e-4
ROWS = 3


def as_gated_norm(module: nn.Module) -> GatedNorm | None:
    """Return the fused norm of a module that is a gated RMS norm, None of any other."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    params: dict[str, Any] = dict(module.named_parameters())
    takes = len(inspect.signature(type(module).forward).parameters)  # self is the first
    if [*params] != ["weight"] or list(module.children()) or not isinstance(eps, float):
        return None
    if takes != 3 or params["weight"].dim() != 1:
        return None
    draw = torch.Generator().manual_seed(0)
    width = params["weight"].shape[0]
    x, gate = torch.randn(2, 1, ROWS, width, generator=draw)
    drawn = torch.rand(width, generator=draw) + 0.5
    stand_in = stand_in_for(module)

    def theirs(magnitude: float) -> torch.Tensor | None:
        weight = nn.Parameter(magnitude * drawn)
        stand_in.register_parameter("weight", weight)
        return tried(stand_in, magnitude * x, magnitude * gate)

    def ours(options: dict[str, Any], magnitude: float) -> torch.Tensor:
        norm = GatedNorm(nn.Parameter(magnitude * drawn), **options)
        return by_torch(magnitude * x, magnitude * gate, norm)

    at = magnitudes(module)
    for groups, gate_first in product(_counts(module, width), (True, False)):
        options: dict[str, Any] = {"eps": eps, "groups": groups, "gate_first": gate_first}
        if agree(theirs, partial(ours, options), at=at, tolerance=TOLERANCE):
            return GatedNorm(params["weight"], **options)
    return None


def _counts(module: nn.Module, width: int) -> list[int]:
    """Return how many groups a row may have: numbers among the attributes are groups or columns."""
    numbers = [x for x in vars(module).values() if type(x) is int and x > 0 and width % x == 0]
    return sorted({1, *numbers, *(width // x for x in numbers)})


PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # a module that has several gives them one input
NORM_PARAMETERS = (["weight"], ["weight", "bias"])
# Factor and shift of the rows that a norm is tried on: means matter, and beside the last one eps.
NORM_TOLERANCE = 1e-4
TRIED_ROWS = ((1.0, 1.0), (3.0, -2.0), (0.01, 0.0))


def fuse_layers_(model: PreTrainedModel) -> Counter[str]:
    """Replace what can be fused in every decoder layer; return how many modules of each kind
    (`norms`, `gated_norms`, `projections`, `rotations`, `recurrences`, `attentions`,
    `feed_forwards`)."""
    replaced: Counter[str] = Counter()
    for layer in decoder_layers(model):
        replaced += fuse_layer_(layer)
    return replaced


def fuse_layer_(layer: nn.Module) -> Counter[str]:
    """`fuse_layers_` of one decoder layer."""
    replaced: Counter[str] = Counter()
    for path, module in list(layer.named_modules()):
        parent, _, name = path.rpartition(".")
        if (norm := _as_fused_norm(module)) is not None:
            setattr(layer.get_submodule(parent), name, norm)
            replaced["norms"] += 1
        elif (gated := as_gated_norm(module)) is not None:
            setattr(layer.get_submodule(parent), name, gated)
            replaced["gated_norms"] += 1
        elif (attention := as_fused_attention(module)) is not None:
            setattr(layer.get_submodule(parent), name, attention)
            replaced["attentions"] += 1
        elif (form := feed_forward_form(module)) is not None:
            feed_forward = FusedFeedForward(module, form=form)
            setattr(layer.get_submodule(parent), name, feed_forward)
            replaced["feed_forwards"] += 1
        else:
            replaced["projections"] += _share_projections_(module)
            replaced["rotations"] += rotate_by_kernel_(module)
            replaced["recurrences"] += recur_by_ours_(module)
    return replaced


def _share_projections_(module: nn.Module) -> bool:
    """Let adapted linears of q, k and v share their input; return whether there are several."""
    linears = [child for name, child in module.named_children() if name in PROJECTIONS]
    share_input_([linear for linear in linears if isinstance(linear, FusedLoraLinear)])
    return len(linears) > 1


def _as_fused_norm(module: nn.Module) -> FusedNorm | None:
    """Return the fused norm of an RMS norm or LayerNorm (w or 1 + w, perhaps a bias), or None."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    params: dict[str, Any] = dict(module.named_parameters())
    if [*params] not in NORM_PARAMETERS or list(module.children()) or not isinstance(eps, float):
        return None
    if params["weight"].dim() != 1 or not takes_one_tensor(module):
        return None
    draw = torch.Generator().manual_seed(0)
    width = params["weight"].shape[0]
    x = torch.stack([x * torch.randn(width, generator=draw) + y for x, y in TRIED_ROWS])
    drawn = {name: torch.rand(width, generator=draw) + 0.5 for name in params}
    stand_in, at = stand_in_for(module), magnitudes(module)

    def times(magnitude: float) -> dict[str, Any]:
        """Return parameters as large: else values would be small however large x is."""
        return {name: nn.Parameter(magnitude * value) for name, value in drawn.items()}

    def theirs(magnitude: float) -> torch.Tensor | None:
        for name in NORM_PARAMETERS[-1]:
            stand_in.register_parameter(name, times(magnitude).get(name))
        return tried(stand_in, magnitude * x)

    def ours(options: dict[str, Any], magnitude: float) -> torch.Tensor:
        y: torch.Tensor = FusedNorm(**times(magnitude), **options)(magnitude * x)
        return y

    for offset, subtracts_mean in product((0.0, 1.0), (False, True)):
        options: dict[str, Any] = {"eps": eps, "offset": offset, "subtracts_mean": subtracts_mean}
        if agree(theirs, partial(ours, options), at=at, tolerance=NORM_TOLERANCE):
            return FusedNorm(**params, **options)
    return None
