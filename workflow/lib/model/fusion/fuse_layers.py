"""Replacement of parts of a decoder layer by fused operations.

A module is replaced only if its class gives the fused result on random values of all magnitudes
(`tried_classes`). A fused norm keeps its input in the compute dtype, a gated feed-forward two wide
tensors less. Attention runs the family's code with one node for queries, keys and values
(`share_input_`) and one rotation (`rotary_functions`); recurrences are matmuls of chunks
(`recurrence_functions`). Parameters keep their names; only rounding differs."""

import inspect
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.kernels.rows.gated_norm import GatedNorm, by_torch
from workflow.lib.kernels.rows.gating import ACTIVATIONS
from workflow.lib.model.fused_feed_forward import Form, FusedFeedForward
from workflow.lib.model.layers.fused_norm import FusedNorm
from workflow.lib.model.layers.lora_linear import FusedLoraLinear, share_input_
from workflow.lib.model.tried_classes.magnitudes import agree, alike, magnitudes
from workflow.lib.model.tried_classes.recurrence_functions import replace_recurrences_
from workflow.lib.model.tried_classes.rotary_functions import rotate_by_kernel_

PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # a module with several of these gives them one input
NORM_PARAMETERS = (["weight"], ["weight", "bias"])
NORM_TOLERANCE = 1e-4
GATED_ROWS = 3  # of the comparison of a gated norm
# Factor and shift of the compared rows: the mean matters, and in the last one eps.
TRIED_ROWS = ((1.0, 1.0), (3.0, -2.0), (0.01, 0.0))
HIDDEN, WIDE, ROWS = 8, 6, 4  # of the comparison of a class
# Of the largest element of the output. The two formulas of the GELU are 2e-4 apart.
TOLERANCE = 1e-5


def feed_forward_form(module: nn.Module) -> Form | None:
    """Return the form of a module that is a gated feed-forward, None of any other."""
    linears, others = _children(module)
    if len(linears) not in (2, 3) or not takes_one_tensor(module):
        return None
    if any(True for child in others.values() for _ in child.parameters()):
        return None
    forms = (_form(module, into, down) for into, down in _orders(linears))
    return next((form for form in forms if form is not None), None)


def _children(module: nn.Module) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    """Return the linears (also quantized or adapted) and the other children."""
    linears: dict[str, Any] = {}
    others: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        of = linears if hasattr(child, "in_features") and hasattr(child, "out_features") else others
        of[name] = child
    return linears, others


def _orders(linears: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names of gate and up (or of one for both) and of down, by their sizes."""
    for *into, down in permutations(linears):
        width = linears[down].in_features * (3 - len(into))
        sizes = {(linears[name].in_features, linears[name].out_features) for name in into}
        if sizes == {(linears[down].out_features, width)}:
            yield tuple(into), down


def _form(module: nn.Module, into: tuple[str, ...], down: str) -> Form | None:
    """Return the form with these linears, None if the module's class computes something else."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=draw)
    made = [_linear(HIDDEN, 2 * WIDE // len(into), draw) for _ in into]
    last = _linear(WIDE, HIDDEN, draw)
    others = {name: stand_in_for(child) for name, child in _children(module)[1].items()}
    stand_in = stand_in_for(module)
    for name, child in (*others.items(), *zip(into, made, strict=True), (down, last)):
        setattr(stand_in, name, child)
    output = tried(stand_in.eval(), x)
    if output is None:
        return None
    at = magnitudes(module, *others.values())
    numbers = _numbers(module, *others.values())
    multipliers = (1.0, *numbers)

    def value(form: Form, magnitude: float) -> torch.Tensor:
        both = torch.cat([linear(magnitude * x) for linear in made], dim=-1)
        gate, up = both.chunk(2, dim=-1)
        y: torch.Tensor = last(form.gating.activated(gate) * up) * form.output_multiplier
        return y

    for activation, gate_multiplier, output_multiplier in product(
        ACTIVATIONS, multipliers, multipliers
    ):
        form = Form(into, down, activation, gate_multiplier, output_multiplier)
        if agree(
            lambda magnitude: tried(stand_in, magnitude * x),
            partial(value, form),
            at=at,
            tolerance=TOLERANCE,
        ):
            dropout = _dropout(stand_in, x, output, numbers)
            return None if dropout is None else form._replace(dropout=dropout)
    return None


def _numbers(*modules: nn.Module) -> list[float]:
    """Return the numbers among modules' attributes: factors, or a share of dropout."""
    numbers = {x for module in modules for x in vars(module).values() if isinstance(x, float)}
    return sorted(numbers - {1.0})


def _dropout(
    stand_in: nn.Module, x: torch.Tensor, output: torch.Tensor, numbers: list[float]
) -> float | None:
    """Return the share of the output that training drops; None if it does something else."""
    with torch.random.fork_rng(devices=[]):
        trained = tried(stand_in.train(), x)
    for share in (0.0, *(number for number in numbers if 0 < number < 1)):
        with torch.random.fork_rng(devices=[]):  # it begins where the one above began
            expected = nn.functional.dropout(output, share, training=True)
        if alike(trained, expected, tolerance=TOLERANCE):
            return share
    return None


def _linear(into: int, out: int, draw: torch.Generator) -> nn.Linear:
    """Return a linear whose output is about as large as its input."""
    linear = nn.Linear(into, out, device="meta")
    linear.weight = nn.Parameter(torch.randn(out, into, generator=draw) / into**0.5)
    linear.bias = nn.Parameter(torch.randn(out, generator=draw) / 2)
    return linear


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
    x, gate = torch.randn(2, 1, GATED_ROWS, width, generator=draw)
    drawn = torch.rand(width, generator=draw) + 0.5
    stand_in = stand_in_for(module)

    def family_output(magnitude: float) -> torch.Tensor | None:
        weight = nn.Parameter(magnitude * drawn)
        stand_in.register_parameter("weight", weight)
        return tried(stand_in, magnitude * x, magnitude * gate)

    def fused_output(options: dict[str, Any], magnitude: float) -> torch.Tensor:
        norm = GatedNorm(nn.Parameter(magnitude * drawn), **options)
        return by_torch(magnitude * x, magnitude * gate, norm)

    at = magnitudes(module)
    for groups, gate_first in product(_counts(module, width), (True, False)):
        options: dict[str, Any] = {"eps": eps, "groups": groups, "gate_first": gate_first}
        if agree(family_output, partial(fused_output, options), at=at, tolerance=NORM_TOLERANCE):
            return GatedNorm(params["weight"], **options)
    return None


def _counts(module: nn.Module, width: int) -> list[int]:
    """Return possible numbers of groups in a row: attributes count groups or columns."""
    numbers = [x for x in vars(module).values() if type(x) is int and x > 0 and width % x == 0]
    return sorted({1, *numbers, *(width // x for x in numbers)})


def fuse_layers_(model: PreTrainedModel) -> Counter[str]:
    """Fuse every decoder layer; return how many modules of each kind were replaced (`norms`,
    `gated_norms`, `projections`, `rotations`, `recurrences`, `feed_forwards`)."""
    replaced: Counter[str] = Counter()
    for layer in decoder_layers(model):
        replaced += fuse_layer_(layer)
    return replaced


def fuse_norms_between_(decoder: nn.Module) -> int:
    """Fuse the norms of a decoder outside of its layers; return their number. The final norm of a
    long row takes ten times its hidden states in fp32 otherwise."""
    norms = {name: _as_fused_norm(module) for name, module in decoder.named_children()}
    fused = {name: norm for name, norm in norms.items() if norm is not None}
    for name, norm in fused.items():
        setattr(decoder, name, norm)
    return len(fused)


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
        elif (form := feed_forward_form(module)) is not None:
            feed_forward = FusedFeedForward(module, form=form)
            setattr(layer.get_submodule(parent), name, feed_forward)
            replaced["feed_forwards"] += 1
        else:
            replaced["projections"] += _share_projections_(module)
            replaced["rotations"] += rotate_by_kernel_(module)
            replaced["recurrences"] += replace_recurrences_(module)
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
        """Return parameters of this magnitude: others would keep values small for any x."""
        return {name: nn.Parameter(magnitude * value) for name, value in drawn.items()}

    def family_output(magnitude: float) -> torch.Tensor | None:
        for name in NORM_PARAMETERS[-1]:
            stand_in.register_parameter(name, times(magnitude).get(name))
        return tried(stand_in, magnitude * x)

    def fused_output(options: dict[str, Any], magnitude: float) -> torch.Tensor:
        y: torch.Tensor = FusedNorm(**times(magnitude), **options)(magnitude * x)
        return y

    for offset, subtracts_mean in product((0.0, 1.0), (False, True)):
        options: dict[str, Any] = {"eps": eps, "offset": offset, "subtracts_mean": subtracts_mean}
        if agree(family_output, partial(fused_output, options), at=at, tolerance=NORM_TOLERANCE):
            return FusedNorm(**params, **options)
    return None


def stand_in_for(module: nn.Module) -> nn.Module:
    """Return a module of the same class and attributes, without its parameters and children."""
    made = type(module).__new__(type(module))  # with the class's methods, which its forward calls
    nn.Module.__init__(made)
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "training":
            setattr(made, name, value)
    return made


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether a class's forward has one argument: an optional other one could change its value."""
    return len(inspect.signature(type(module).forward).parameters) == 2  # self is the first


@torch.no_grad()
def tried(stand_in: nn.Module, *inputs: torch.Tensor) -> torch.Tensor | None:
    """Return a stand-in's output; None if it is no tensor, or attributes or shapes are missing."""
    try:
        output = type(stand_in).forward(stand_in, *inputs)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return output if isinstance(output, torch.Tensor) else None
