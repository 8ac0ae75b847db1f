"""What a feed-forward in one node must compute with the GPU kernels: by Triton's interpreter on the
CPU, compiled on a GPU; beside what it computes without them."""

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

    def __init__(self, layers: list[Layer], activation: str) -> None:
        nn.Module.__init__(self)
        into = next(into for into in INTO.values() if len(into) == len(layers) - 1)
        self.layers = dict(zip((*into, "down"), layers, strict=True))
        self._form = Form(into, "down", activation, gate_multiplier=0.7, output_multiplier=0.3)

    def get_submodule(self, target: str) -> Any:
        return self.layers[target]


def layers_of(
    folder: Path,
    kind: str,
    dtype: torch.dtype,
    device: str,
    into: str = "two linears",
) -> list[Layer]:
    """Return gate with a bias, up, and down, or gate and up in one, with adapters; kind: one of
    `FACTORS`, into: one of `INTO`."""
    layers = []
    count = len(INTO[into])
    sizes = [*[(2 * WIDE // count, HIDDEN)] * count, (HIDDEN, WIDE)]
    for number, (out, into_features) in enumerate(sizes):
        bias = random(out, seed=20) if number == 0 and kind != "dora" else None
        weight = 0.1 * random(out, into_features, seed=number)
        base = nf4_linear(folder / str(number), weight, bias=bias).to(device)
        if base.bias is not None:
            base.bias.data = base.bias.to(dtype)
        masters = (
            0.3 * random(RANK, into_features, seed=3 + number),
            0.3 * random(out, RANK, seed=9),
        )
        keys = torch.tensor(row_keys(1, step=1, rows=[0])).to(device)
        factor = (random(out, seed=30).abs() + 0.5).to(device) if kind == "dora" else None
        draw = Draw(keys, number, 20_000) if kind == "dropout" else None
        layers.append(
            Layer(
                base,
                *(x.to(device).requires_grad_() for x in masters),
                factor=None if factor is None else factor.requires_grad_(),
                draw=draw,
            )
        )
    return layers


def values_and_gradients(
    folder: Path, kind: str, *, into: str, dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    layers = layers_of(folder, kind, dtype, device, into)
    x, grad = (random(ROWS, HIDDEN, seed=seed).to(device, dtype) for seed in (40, 41))
    given = [x.requires_grad_(), *(w for layer in layers for w in layer.weights)]
    given += [layer.factor for layer in layers if layer.factor is not None]
    y = OneNode(layers, "silu")(x)
    found = [y, *torch.autograd.grad(y, given, grad)]
    return [tensor.detach().float().cpu() for tensor in found]
