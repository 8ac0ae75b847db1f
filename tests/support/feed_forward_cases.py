"""A feed-forward in one node, in fp32 on the CPU, of which Triton's interpreter must compute with
the GPU kernels what it computes without them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.adapted_layers import Layer, random
from tests.support.models import nf4_linear
from workflow.lib.kernels.rows.dropout import Draw
from workflow.lib.model.fused_feed_forward import Form, FusedFeedForward
from workflow.lib.model.layers.adapter_dropout import row_keys

HIDDEN, WIDE, ROWS, RANK = 192, 128, 9, 5
FACTORS = ("plain", "dropout", "dora")
INTO = {"two linears": ("gate", "up"), "one linear": ("both",)}


class OneNode(FusedFeedForward):
    """A feed-forward of layers that are no modules."""

    def __init__(self, layers: list[Layer], into: tuple[str, ...]) -> None:
        nn.Module.__init__(self)
        self.layers = dict(zip((*into, "down"), layers, strict=True))
        self._form = Form(into, "down", "silu", gate_multiplier=0.7, output_multiplier=0.3)

    def get_submodule(self, target: str) -> Any:
        return self.layers[target]


def layers_of(folder: Path, kind: str, into: str) -> list[Layer]:
    """Return gate with a bias, up, and down, or gate and up in one, with adapters; kind: one of
    `FACTORS`, into: one of `INTO`."""
    layers = []
    count = len(INTO[into])
    sizes = [*[(2 * WIDE // count, HIDDEN)] * count, (HIDDEN, WIDE)]
    for number, (out, into_features) in enumerate(sizes):
        bias = random(out, seed=20) if number == 0 and kind != "dora" else None
        weight = 0.1 * random(out, into_features, seed=number)
        base = nf4_linear(folder / str(number), weight, bias=bias)
        down = 0.3 * random(RANK, into_features, seed=3 + number)
        up = 0.3 * random(out, RANK, seed=9)
        keys = torch.tensor(row_keys(1, step=1, rows=[0]))
        factor = (random(out, seed=30).abs() + 0.5).requires_grad_() if kind == "dora" else None
        draw = Draw(keys, number, 20_000) if kind == "dropout" else None
        masters = (down.requires_grad_(), up.requires_grad_())
        layers.append(Layer(base, *masters, factor=factor, draw=draw))
    return layers


def values_and_gradients(folder: Path, kind: str, *, into: str) -> list[torch.Tensor]:
    layers = layers_of(folder, kind, into)
    x, grad = (random(ROWS, HIDDEN, seed=seed) for seed in (40, 41))
    given = [x.requires_grad_(), *(w for layer in layers for w in layer.weights)]
    given += [layer.factor for layer in layers if layer.factor is not None]
    y = OneNode(layers, INTO[into])(x)
    return [tensor.detach() for tensor in (y, *torch.autograd.grad(y, given, grad))]
