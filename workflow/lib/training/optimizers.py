"""AdamW over the shards of the adapter: torch's own, or that of bitsandbytes, with moments of 8
bits or paged to the host.

Adam is element by element, so every process updates its own shard as if it were a whole tensor:
bitsandbytes knows no DTensor, and torch dispatches each one by itself, in 15 times the time of
plain tensors, for which the GPU would wait. Moments of 8 bits have a scale per 256 neighbouring
elements of a shard (arXiv 2110.02861): another number of processes cuts other blocks, so from their
checkpoint moments are decoded and quantized anew, which moves them by at most half a step of their
code; everything else is exact.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict

import torch
from bitsandbytes.functional import create_dynamic_map, quantize_blockwise
from bitsandbytes.optim.adamw import AdamW
from torch import nn

from workflow.lib.distributed.sharded_files import DamagedError, Piece, piece_of
from workflow.lib.model.nf4_model import cut_of, local, local_range

# Elements that share a scale: bitsandbytes/optim/optimizer.py, Optimizer2State.init_state.
BLOCK_SIZE = 256
# Moment, which is its key in torch's state -> its key in that of bitsandbytes; its scales have
# "absmax" in place of "state".
MOMENTS = {"exp_avg": "state1", "exp_avg_sq": "state2"}
BITS_AND_PAGED = {
    "adamw_8bit": (8, False),
    "paged_adamw_8bit": (8, True),
    "paged_adamw": (32, True),
}


class AdamSettings(TypedDict):
    """What both implementations call by the same names."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class ShardwiseAdam(torch.optim.Optimizer):
    """AdamW over this process's shards. `count` (): the updates so far, which is the moments'
    step.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        *,
        kind: str,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """params: by name, sharded. kind: `adamw`, or of `BITS_AND_PAGED`.

        Moments are made at once, so that a checkpoint can be read into them.
        """
        super().__init__(params.values(), {"lr": lr})
        self.count = torch.zeros((), dtype=torch.int64)
        self._begun = False
        self._params = dict(params)
        self._shards = {name: nn.Parameter(_shard(param)) for name, param in params.items()}
        shards = [shard for shard in self._shards.values() if shard.numel()]
        settings = AdamSettings(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._bits, paged = BITS_AND_PAGED.get(kind, (32, False))
        self._inner: _TorchAdamW | _BitsandbytesAdamW = (
            _BitsandbytesAdamW(shards, settings, bits=self._bits, paged=paged)
            if kind in BITS_AND_PAGED
            else _TorchAdamW(shards, settings)
        )
        self._scales = {name: self._padded_scales(name) for name in params}

    def _padded_scales(self, name: str) -> dict[str, torch.Tensor]:
        """Put the scales of both moments into buffers of the largest shard's size, so that those of
        all shards are one tensor.
        """
        if self._bits != 8 or isinstance(self._inner, _TorchAdamW):
            return {}
        param, shard, buffers = self._params[name], self._shards[name], {}
        for moment, key in MOMENTS.items():
            buffers[moment] = shard.new_zeros(_blocks(param.shape, cuts=cut_of(param)[0]))
            if shard.numel():
                state, scales = self._inner.state_of(shard), key.replace("state", "absmax")
                state[scales] = buffers[moment][: len(state[scales])]
        return buffers

    @property
    def device_decides(self) -> bool:
        """Whether the device itself can leave an update: torch's own can be told so."""
        return isinstance(self._inner, _TorchAdamW)

    def begin(self, *, unless: torch.Tensor) -> None:
        """Start the update where the device decides on it, so that it need not wait for the host.

        unless: () bool on the device. `step` completes the update; without it nothing has happened
        if `unless` is true.
        """
        self._begun = self.device_decides
        if self._begun:
            self._update(unless)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or set them to zero where they are: this process's shards of them,
        by one launch.
        """
        if set_to_none:
            super().zero_grad()
            return
        gradients = [local(p.grad) for p in self._params.values() if p.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every shard that has a gradient, if `begin` has not."""
        assert closure is None, "a closure's gradients would be summed over no process"
        if not self._begun:
            self._update(None)
        self._begun = False
        self.count += 1
        for shard in self._shards.values():
            shard.grad = None

    @torch.no_grad()
    def _update(self, unless: torch.Tensor | None) -> None:
        (group,) = self.param_groups
        for name, param in self._params.items():
            shard = self._shards[name]
            shard.data = _shard(param)
            shard.grad = None if param.grad is None else local(param.grad).contiguous()
        self._inner.step(int(self.count), lr=group["lr"], unless=unless)

    def pieces(self, name: str, *, rank: int) -> dict[str, Piece]:
        """Return this process's part of a parameter's moments, and of their scales.

        The scales are (processes, blocks). All are the live tensors.
        """
        param = self._params[name]
        weight = piece_of(param.detach(), rank=rank)
        pieces = {moment: replace(weight, local=self._moment(name, moment)) for moment in MOMENTS}
        cuts, cut = cut_of(param)
        for moment, scales in self._scales[name].items():
            row = scales.view(1, -1)
            pieces[f"{moment}_absmax"] = Piece(row, (cut, 0), (cuts, len(scales)), weight.mine)
        return pieces

    def _moment(self, name: str, moment: str) -> torch.Tensor:
        """Return a moment of this process's shard."""
        shard = self._shards[name]
        if not shard.numel():  # bitsandbytes keeps nothing for it
            return shard.detach().to(torch.uint8 if self._bits == 8 else torch.float32)
        return self._inner.moment(shard, moment)

    @torch.no_grad()
    def requantize_(self, name: str, stored: Mapping[str, torch.Tensor]) -> None:
        """Take moments of 8 bits that other processes' cuts have quantized; `stored`: whole, named
        as in `pieces`.

        Raises `DamagedError` if their shapes do not belong to the parameter.
        """
        param = self._params[name]
        start, stop = local_range(param)
        for moment in MOMENTS:
            code = create_dynamic_map(signed=moment == "exp_avg")
            decoded = _decoded(stored[moment], stored[f"{moment}_absmax"], code, shape=param.shape)
            if start == stop:
                continue
            shard = decoded[start:stop].contiguous()
            quantized, state = quantize_blockwise(shard, code=code, blocksize=BLOCK_SIZE)
            values = self._moment(name, moment)
            values.copy_(quantized.view_as(values))
            self._scales[name][moment][: len(state.absmax)].copy_(state.absmax)


class _TorchAdamW:
    """torch's own, fused."""

    def __init__(self, shards: list[nn.Parameter], settings: AdamSettings) -> None:
        self._adamw = torch.optim.AdamW(shards, **settings, fused=True)
        for shard in shards:
            step = torch.zeros((), device=shard.device)
            self._adamw.state[shard] = {
                "step": step,
                **{m: torch.zeros_like(shard) for m in MOMENTS},
            }
        self._count = 0

    def step(self, count: int, *, lr: float, unless: torch.Tensor | None) -> None:
        """Update the shards that have a gradient, which have been updated `count` times; not if
        `unless` is true.
        """
        if count != self._count:  # a checkpoint was read, or the update before was left
            for state in self._adamw.state.values():
                state["step"].fill_(count)
        (group,) = self._adamw.param_groups
        group["lr"] = lr
        # what torch.amp.GradScaler tells a fused optimizer
        found_inf = None if unless is None else unless.float()
        self._adamw.found_inf = found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        self._count = count + 1

    def moment(self, shard: nn.Parameter, moment: str) -> torch.Tensor:
        """Return a moment of a shard; the live tensor."""
        values: torch.Tensor = self._adamw.state[shard][moment]
        return values


class _BitsandbytesAdamW:
    """That of bitsandbytes."""

    def __init__(
        self, shards: list[nn.Parameter], settings: AdamSettings, *, bits: int, paged: bool
    ) -> None:
        self._adamw = AdamW(shards, **settings, optim_bits=bits, min_8bit_size=1, is_paged=paged)
        (group,) = self._adamw.param_groups
        for index, shard in enumerate(shards):
            self._adamw.init_state(group, shard, 0, index)
        if paged and torch.cuda.is_available():
            # filled with zeros by then: before a checkpoint is read into it
            torch.cuda.synchronize()

    def step(self, count: int, *, lr: float, unless: torch.Tensor | None) -> None:
        """Update the shards that have a gradient, which have been updated `count` times."""
        assert unless is None, "bitsandbytes updates always"
        (group,) = self._adamw.param_groups
        group["lr"] = lr
        for state in self._adamw.state.values():
            state["step"] = count
        self._adamw.step()

    def moment(self, shard: nn.Parameter, moment: str) -> torch.Tensor:
        """Return a moment of a shard as it is stored; the live tensor."""
        values: torch.Tensor = self.state_of(shard)[MOMENTS[moment]]
        return values

    def state_of(self, shard: nn.Parameter) -> dict[str, Any]:
        """Return all that is kept for a shard."""
        state: dict[str, Any] = self._adamw.state[shard]
        return state


@torch.no_grad()
def _shard(param: nn.Parameter) -> torch.Tensor:
    """Return this process's values of a parameter, not a copy."""
    values = local(param)
    assert values.is_contiguous(), "a copy would be updated"
    return values.detach()


def _blocks(shape: torch.Size, *, cuts: int) -> int:
    """Return the blocks of the largest of `cuts` shards."""
    return math.ceil(math.ceil(shape[0] / cuts) * math.prod(shape[1:]) / BLOCK_SIZE)


def _decoded(
    values: torch.Tensor, scales: torch.Tensor, code: torch.Tensor, *, shape: torch.Size
) -> torch.Tensor:
    """Return a moment in fp32, of which row i of `scales` belongs to shard i of `values`."""
    cuts = scales.shape[0]
    if values.shape != shape or scales.shape != (cuts, _blocks(shape, cuts=cuts)):
        raise DamagedError(f"moments of {tuple(values.shape)} with scales of {tuple(scales.shape)}")
    rows = math.ceil(shape[0] / cuts)
    decoded = code[values.long()]
    for cut, of_blocks in enumerate(scales):
        part = decoded[cut * rows : (cut + 1) * rows]
        part *= of_blocks.repeat_interleave(BLOCK_SIZE)[: part.numel()].view_as(part)
    return decoded
