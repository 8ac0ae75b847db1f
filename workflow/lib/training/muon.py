"""Muon: momentum whose matrices are made orthogonal (Jordan et al. 2024, kellerjordan.github.io).

Each process keeps and updates its shards. For the direction every process gathers the momentum of
whole matrices, in bfloat16 as the iteration takes it, so the update does not depend on the number
of processes. Matrices of one shape go together: an adapter has hundreds of them, of few shapes.
An adapter of a mixture's stack is as many matrices as the stack has experts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from workflow.lib.model.nf4_model import cut_of

# Of the quintic polynomial and the floor of the norm: torch.optim.Muon's defaults.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7
MOST_ELEMENTS = 2**24  # that are gathered at once: 32 MiB, and a few times that beside it


@dataclass(frozen=True)
class Matrices:
    """How a trained tensor (rows, columns) holds matrices of one shape."""

    count: int = 1
    in_columns: bool = False  # whether they alternate by columns; else they lie one below the other

    def apart(self, whole: torch.Tensor) -> torch.Tensor:
        """Return (..., rows, columns) as (..., count, rows, columns) of each."""
        *before, rows, columns = whole.shape
        if self.in_columns:
            return whole.reshape(*before, rows, -1, self.count).movedim(-1, -3)
        return whole.reshape(*before, self.count, -1, columns)

    def together(self, apart: torch.Tensor, *, like: torch.Size) -> torch.Tensor:
        """Undo `apart`."""
        moved = apart.movedim(-3, -1) if self.in_columns else apart
        return moved.reshape(*apart.shape[:-3], *like)


class Muon:
    """Updates the adapter's matrices, of which it keeps the momentum of this process's shards."""

    device_decides = False

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        shards: Mapping[str, nn.Parameter],
        *,
        matrices: Mapping[str, Matrices],
        momentum: float,
        weight_decay: float,
        match_adamw: bool,
    ) -> None:
        """params: whole or cut on dim 0, by name. shards: this process's values of them."""
        self._params, self._shards, self._matrices = params, shards, matrices
        self._factor, self._weight_decay = momentum, weight_decay
        self._match_adamw = match_adamw
        self._momentum = {name: torch.zeros_like(shards[name]) for name in params}
        self._groups = self._alike()

    def state(self, name: str, key: str) -> torch.Tensor:
        """Return the momentum of a shard; the live tensor."""
        assert key == "momentum", f"Muon keeps no {key}"
        return self._momentum[name]

    @torch.no_grad()
    def step(self, count: int, *, lr: float, unless: torch.Tensor | None) -> None:
        """Update the shards that have a gradient. Collective."""
        assert unless is None, "Muon updates always"
        for group in self._groups:
            names = [name for name in group if self._shards[name].grad is not None]
            if names:
                self._update(names, lr=lr)

    def _update(self, names: list[str], *, lr: float) -> None:
        first = self._params[names[0]]
        directions = []
        for name in names:  # Nesterov's
            gradient, momentum = self._shards[name].grad, self._momentum[name]
            assert gradient is not None, "only what has a gradient is updated"
            momentum.lerp_(gradient, 1 - self._factor)
            directions.append(gradient.lerp(momentum, self._factor).bfloat16())
        form = self._matrices[names[0]]
        apart = form.apart(gathered(directions, like=first))
        shape = apart.shape[-2:]
        done = orthogonal(apart.flatten(0, 1)).view_as(apart)
        whole = form.together(done, like=first.shape)
        rows = -(-first.shape[0] // cut_of(first)[0])
        start = rows * cut_of(first)[1]
        rate = lr * self._ratio(*shape)
        for name, update in zip(names, whole, strict=True):
            shard = self._shards[name]
            shard.mul_(1 - lr * self._weight_decay)
            shard.add_(update[start : start + len(shard)], alpha=-rate)

    def _ratio(self, rows: int, columns: int) -> float:
        """What the rate is multiplied by for a matrix: `adjust_lr_fn` of torch.optim.Muon."""
        if self._match_adamw:  # arXiv 2502.16982, sec. 2.2
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def _alike(self) -> list[list[str]]:
        """Return the names of tensors that are gathered together, the same on all processes."""
        by_form: dict[object, list[str]] = {}
        for name, param in self._params.items():
            cut = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
            by_form.setdefault((param.shape, self._matrices[name], cut), []).append(name)
        groups = []
        for names in by_form.values():
            size = max(1, MOST_ELEMENTS // self._params[names[0]].numel())
            groups += [names[i : i + size] for i in range(0, len(names), size)]
        return groups


def gathered(shards: Sequence[torch.Tensor], *, like: torch.Tensor) -> torch.Tensor:
    """Return whole tensors (n, rows, columns) in bfloat16 of this process's shards of them. like:
    one of them, whose mesh cuts them on dim 0. Collective."""
    cuts, _ = cut_of(like)
    rows, columns = like.shape
    part = -(-rows // cuts)
    packed = shards[0].new_zeros(len(shards), part, columns)
    for target, shard in zip(packed, shards, strict=True):
        target[: len(shard)] = shard
    if cuts == 1:
        return packed
    assert isinstance(like, DTensor), "only these are cut"
    axis = next(axis for axis, cut in enumerate(like.placements) if cut.is_shard())
    whole = packed.new_empty(cuts * len(shards), part, columns)
    bits = torch.uint8  # as which any backend sends them
    group = like.device_mesh.get_group(axis)
    dist.all_gather_into_tensor(whole.view(bits), packed.view(bits), group=group)
    by_process = whole.view(cuts, len(shards), part, columns)
    return by_process.transpose(0, 1).flatten(1, 2)[:, :rows]


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices (n, rows, columns) in bfloat16 with all singular values near 1. By a quintic
    Newton-Schulz iteration, which leaves them between about 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
