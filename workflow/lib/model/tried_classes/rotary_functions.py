"""A family's attention with heads rotated by our kernel (`kernels.rows.rotary`): the rotating
function of its file is identified on random values and replaced (`called_functions`)."""

import functools
import inspect
from collections.abc import Callable
from itertools import product
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from workflow.lib.kernels.rows.rotary import apply_rotary
from workflow.lib.model.tried_classes.called_functions import replace_called_functions_
from workflow.lib.model.tried_classes.magnitudes import agree, magnitudes

ROWS, HEADS, TOKENS, HEAD_DIM = 2, (4, 2), 5, 8  # of a compared function
TOLERANCE = 1e-5
AXIS = "unsqueeze_dim"  # a parameter: the dimension of the heads, 1 or 2
Heads = tuple[torch.Tensor, ...]


class Form(NamedTuple):
    """The arguments and layout of a function that rotates heads."""

    tensors: int  # of heads, its first parameters; `cos` and `sin` follow
    axis: int  # of the heads, unless a call names another
    neighbours: bool  # as in `kernels.rows.rotary`
    table: str  # how `cos` and `sin` hold the angle of each pair: `TABLES`
    parts: bool = False  # whether it takes tables with fewer dims than the heads


class Table(NamedTuple):
    """A way to hold the angles of pairs (rows, tokens, pairs) in a table (rows, tokens, width)."""

    by_pairs: Callable[[torch.Tensor], torch.Tensor]
    pairs_of: Callable[[torch.Tensor], torch.Tensor]  # the other way, as a view


TABLES = {
    "once": Table(lambda x: x, lambda x: x),
    "halves": Table(lambda x: torch.cat((x, x), dim=-1), lambda x: x.chunk(2, dim=-1)[0]),
    "neighbours": Table(lambda x: x.repeat_interleave(2, dim=-1), lambda x: x[..., ::2]),
}


def rotate_by_kernel_(module: nn.Module) -> bool:
    """Replace each function that rotates heads in a module's forward; return whether one is."""
    return replace_called_functions_(module, _rotating)


def _rotating(function: FunctionType) -> Callable[..., Any] | None:
    """Return the engine's replacement of a rotating function, which gets unknown calls."""
    if (form := rotary_form(function)) is None:
        return None

    def rotating(*args: Any, **options: Any) -> Any:
        axis = options.get(AXIS, form.axis)
        fits = len(args) == form.tensors + 2 and options.keys() <= {AXIS} and axis in (1, 2)
        if not fits or args[-1].dim() != 3 or not _takes(form, args[0], args[-1]):
            return function(*args, **options)
        *heads, cos, sin = args
        made = _rotated(heads, cos, sin, form._replace(axis=axis))
        return made if form.tensors > 1 else made[0]

    return rotating


def _takes(form: Form, heads: torch.Tensor, angles: torch.Tensor) -> bool:
    """Whether a function of this form rotates so many dimensions of heads."""
    turned = 2 * TABLES[form.table].pairs_of(angles).shape[-1]
    return turned == heads.shape[-1] or (form.parts and turned < heads.shape[-1])


def _rotated(heads: Any, cos: torch.Tensor, sin: torch.Tensor, form: Form) -> Heads:
    cos, sin = (TABLES[form.table].pairs_of(angles) for angles in (cos, sin))
    by_token = (x.transpose(1, 2) if form.axis == 1 else x for x in heads)
    made = apply_rotary(*by_token, cos=cos, sin=sin, neighbours=form.neighbours)
    return tuple(x.transpose(1, 2) if form.axis == 1 else x for x in made)


@functools.cache
def rotary_form(function: FunctionType) -> Form | None:
    """Return the form of a function that rotates heads, None of any other."""
    parameters = inspect.signature(function).parameters
    names = [*parameters]
    if "cos" not in names or names[names.index("cos") + 1 :][:1] != ["sin"]:
        return None
    tensors = names.index("cos")
    axis = parameters[AXIS].default if AXIS in names else 1
    if tensors not in (1, 2) or axis not in (1, 2):
        return None
    axes = (1, 2) if AXIS in names else (axis,)
    for neighbours, table in product((False, True), TABLES):
        form = Form(tensors, axis, neighbours, table)
        whole, part = (
            {_agrees(function, form, each, pairs) for each in axes}
            for pairs in (HEAD_DIM // 2, HEAD_DIM // 4)
        )
        if whole == {True} and False not in part:
            return form._replace(parts=part == {True})
    return None


def _agrees(function: FunctionType, form: Form, axis: int, pairs: int) -> bool | None:
    """Whether a function rotates so many pairs in this form; None: it takes no such arguments."""
    heads, cos, sin = _drawn(form, axis, pairs)
    options = {} if axis == form.axis else {AXIS: axis}

    def family_heads(magnitude: float) -> Any:
        rotated = function(*(magnitude * x for x in heads), cos, sin, **options)
        return rotated if isinstance(rotated, tuple) else (rotated,)

    def engine_heads(magnitude: float) -> Heads:
        return _rotated([magnitude * x for x in heads], cos, sin, form._replace(axis=axis))

    try:
        return agree(family_heads, engine_heads, at=magnitudes(function), tolerance=TOLERANCE)
    except (TypeError, RuntimeError, IndexError):
        return None


def _drawn(form: Form, axis: int, pairs: int) -> tuple[Heads, torch.Tensor, torch.Tensor]:
    """Return small random tensors of heads, and tables of two angles, which may be any numbers."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((ROWS, TOKENS, count, HEAD_DIM) for count in HEADS[: form.tensors])
    heads = [torch.randn(shape, generator=draw) for shape in shapes]
    angles = torch.randn(2, 1, TOKENS, pairs, generator=draw)
    cos, sin = (TABLES[form.table].by_pairs(angle) for angle in angles)
    return tuple(x.transpose(1, 2) if axis == 1 else x for x in heads), cos, sin
