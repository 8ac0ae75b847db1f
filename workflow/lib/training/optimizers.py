"""AdamW over each process's own shards of the trained parameters, and the learning rate by step.

It works element by element, so it can treat a shard as a whole tensor: bitsandbytes knows no
DTensor, and torch takes 15 times as long for one. Moments of 8 bits have a scale per 256 elements
of a shard (arXiv 2110.02861): for another number of processes they are decoded and quantized anew,
off by at most half a step of their code."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from bitsandbytes.functional import create_dynamic_map, quantize_blockwise
from bitsandbytes.optim.adamw import AdamW
from torch import nn
from transformers import get_scheduler

from workflow.lib.distributed.sharded_files import DamagedError, Piece, piece_of
from workflow.lib.model.nf4_model import cut_of, local, local_range
from workflow.lib.settings.config import TrainConfig
from workflow.lib.settings.optimizer_kinds import BLOCK_SIZE, MOMENTS, OPTIMIZERS


class ShardwiseOptimizer(torch.optim.Optimizer):
    """`train.optimizer` over this process's shards; `count` (): the updates so far."""

    def __init__(self, params: Mapping[str, nn.Parameter], train: TrainConfig) -> None:
        """params: by name, sharded. Moments are made here: checkpoints are read into them."""
        super().__init__(params.values(), {"lr": train.learning_rate})
        self.count = torch.zeros((), dtype=torch.int64)
        self.device_decides = OPTIMIZERS[train.optimizer].device_decides
        self._begun = False
        self._params = dict(params)
        self._shards = {name: nn.Parameter(_shard(param)) for name, param in params.items()}
        self._adamw = KINDS[train.optimizer](self._groups(train.loraplus_lr_ratio), train)
        self._scales = {name: self._padded_scales(name) for name in params}

    def _groups(self, ratio: float | None) -> list[dict[str, Any]]:
        """Return the shards by their learning rate as a multiple of the step's: one group, or two
        as in PEFT's `create_loraplus_optimizer`. bitsandbytes keeps nothing for an empty shard."""
        groups: dict[float, list[nn.Parameter]] = {}
        for name, shard in self._shards.items():
            faster = ratio is not None and ("lora_B" in name or shard.ndim == 1)
            if shard.numel():
                groups.setdefault(ratio if ratio and faster else 1.0, []).append(shard)
        return [{"params": shards, "lr_ratio": times} for times, shards in groups.items()]

    def _padded_scales(self, name: str) -> dict[str, torch.Tensor]:
        """Move the scales of a shard's moments to equal buffers, so that they are one tensor."""
        if not self._adamw.scales:
            return {}
        param, shard = self._params[name], self._shards[name]
        length = _blocks(param.shape, cuts=cut_of(param)[0])
        buffers = {key: shard.new_zeros(length) for key in MOMENTS}
        if shard.numel():
            state = self._adamw.library_optimizer.state[shard]
            for buffer, scales in zip(buffers.values(), self._adamw.scales, strict=True):
                state[scales] = buffer[: len(state[scales])]
        return buffers

    def begin(self, *, unless: torch.Tensor) -> None:
        """Start the update without the host waiting for the device's decision. unless: () bool on
        the device. `step` completes the update; without it nothing has happened if `unless` is
        true."""
        self._begun = self.device_decides
        if self._begun:
            self._update(unless)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or zero this process's shards of them, by one launch."""
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
        self._adamw.step(int(self.count), lr=group["lr"], unless=unless)

    def pieces(self, name: str, *, rank: int) -> dict[str, Piece]:
        """Return this process's part of a parameter's moments, and of their scales. The scales are
        (processes, blocks). All are the live tensors."""
        param = self._params[name]
        weight = piece_of(param.detach(), rank=rank)
        pieces = {key: replace(weight, local=x) for key, x in self._moments(name).items()}
        cuts, cut = cut_of(param)
        for key, scales in self._scales[name].items():
            shape = (cuts, len(scales))
            pieces[f"{key}_absmax"] = Piece(scales.view(1, -1), (cut, 0), shape, weight.is_written)
        return pieces

    def _moments(self, name: str) -> dict[str, torch.Tensor]:
        """Return the moments of this process's shard."""
        shard, adamw = self._shards[name], self._adamw
        if not shard.numel():
            return dict.fromkeys(MOMENTS, shard.detach().to(adamw.dtype))
        state = adamw.library_optimizer.state[shard]
        return {
            key: state[library_key] for key, library_key in zip(MOMENTS, adamw.moments, strict=True)
        }

    @torch.no_grad()
    def requantize_(self, name: str, stored: Mapping[str, torch.Tensor]) -> None:
        """Take 8-bit moments that were quantized with other cuts; stored: whole, named as in
        `pieces`. Raises `DamagedError` if their shapes do not belong to the parameter."""
        param = self._params[name]
        start, stop = local_range(param)
        for key, values in self._moments(name).items():
            code = create_dynamic_map(signed=key == "exp_avg")
            decoded = _decoded(stored[key], stored[f"{key}_absmax"], code, shape=param.shape)
            if start == stop:
                continue
            shard = decoded[start:stop].contiguous()
            quantized, quant_state = quantize_blockwise(shard, code=code, blocksize=BLOCK_SIZE)
            values.copy_(quantized.view_as(values))
            self._scales[name][key][: len(quant_state.absmax)].copy_(quant_state.absmax)


class _AdamW:
    """torch's AdamW, fused."""

    moments: tuple[str, ...] = MOMENTS
    scales: tuple[str, ...] = ()
    dtype = torch.float32

    def __init__(self, groups: list[dict[str, Any]], train: TrainConfig) -> None:
        self.library_optimizer = torch.optim.AdamW(groups, **_adam_arguments(train), fused=True)
        for shard in chain.from_iterable(group["params"] for group in groups):
            step = torch.zeros((), device=shard.device)
            moments = {key: torch.zeros_like(shard) for key in MOMENTS}
            self.library_optimizer.state[shard] = {"step": step, **moments}
        self._count = 0

    def step(self, count: int, *, lr: float, unless: torch.Tensor | None) -> None:
        """Update shards with a gradient, updated `count` times before, unless `unless` is true."""
        if count != self._count:  # a checkpoint was read, or the last update was skipped
            for state in self.library_optimizer.state.values():
                state["step"].fill_(count)
        _set_rates(self.library_optimizer, lr)
        # torch.amp.GradScaler's argument to a fused optimizer
        found_inf = None if unless is None else unless.float()
        self.library_optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        self.library_optimizer.step()
        self._count = count + 1


class _AdamW8bit:
    """bitsandbytes' 8-bit AdamW."""

    moments: tuple[str, ...] = ("state1", "state2")
    scales: tuple[str, ...] = ("absmax1", "absmax2")
    dtype = torch.uint8

    def __init__(self, groups: list[dict[str, Any]], train: TrainConfig) -> None:
        self.library_optimizer = AdamW(
            groups, **_adam_arguments(train), optim_bits=8, min_8bit_size=1
        )
        for number, group in enumerate(self.library_optimizer.param_groups):
            for index, shard in enumerate(group["params"]):
                self.library_optimizer.init_state(group, shard, number, index)

    def step(self, count: int, *, lr: float, unless: torch.Tensor | None) -> None:
        """Update shards with a gradient, updated `count` times before."""
        assert unless is None, "bitsandbytes updates always"
        _set_rates(self.library_optimizer, lr)
        for state in self.library_optimizer.state.values():
            state["step"] = count
        self.library_optimizer.step()


KINDS: dict[str, type[_AdamW] | type[_AdamW8bit]] = {"adamw": _AdamW, "adamw_8bit": _AdamW8bit}


def _set_rates(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]


def _adam_arguments(train: TrainConfig) -> dict[str, Any]:
    """Return the arguments that both implementations share."""
    return {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_eps,
        "weight_decay": train.weight_decay,
    }


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
    """Return a moment in fp32; row i of `scales` belongs to shard i of `values`."""
    cuts = scales.shape[0]
    if values.shape != shape or scales.shape != (cuts, _blocks(shape, cuts=cuts)):
        raise DamagedError(f"moments of {tuple(values.shape)} with scales of {tuple(scales.shape)}")
    rows = math.ceil(shape[0] / cuts)
    decoded = code[values.long()]
    for cut, block_scales in enumerate(scales):
        part = decoded[cut * rows : (cut + 1) * rows]
        part *= block_scales.repeat_interleave(BLOCK_SIZE)[: part.numel()].view_as(part)
    return decoded


def learning_rate(train: TrainConfig, *, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step` (0-based) of `num_steps`: linear from 0 (exclusive)
    to the peak over `warmup_steps` or ceil(warmup_share * num_steps), then by the schedule. All but
    `constant` end at `min_lr_share` of the peak, one step after the last."""
    warmup = train.warmup_steps
    if warmup is None:
        warmup = _steps(train.warmup_share, num_steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    steps_after_warmup = num_steps - warmup
    arguments: dict[str, Any] = {
        "cosine_with_restarts": {"num_cycles": train.lr_cycles},
        "warmup_stable_decay": {
            "num_decay_steps": min(steps_after_warmup, _steps(train.decay_share, num_steps))
        },
    }.get(train.lr_schedule, {})
    decay = _decay(train.lr_schedule, steps_after_warmup, **arguments)(step - warmup)
    floor = 1.0 if train.lr_schedule == "constant" else train.min_lr_share
    return train.learning_rate * (floor + (1.0 - floor) * decay)


def _steps(share: float, num_steps: int) -> int:
    return math.ceil(round(share * num_steps, 6))  # 0.07 * 100 is 7.000000000000001


@cache
def _decay(schedule: str, num_steps: int, **arguments: Any) -> Callable[[int], float]:
    """Return the factor by step of Transformers' schedule of so many steps."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = get_scheduler(schedule, optimizer, 0, num_steps, arguments)
    factors: list[Callable[[int], float]] = scheduler.lr_lambdas
    return factors[0]
