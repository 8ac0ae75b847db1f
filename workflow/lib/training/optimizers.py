"""The optimizers over the shards of what is trained: each process updates its own.

AdamW is element by element, so a shard is a whole tensor to it: bitsandbytes knows no DTensor, and
torch takes 15 times as long for one. Moments of 8 bits have a scale per 256 elements of a shard
(arXiv 2110.02861): for other processes they are decoded and quantized anew, off by at most half a
step of their code. Muon gathers whole matrices (`muon`)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from bitsandbytes.functional import create_dynamic_map, quantize_blockwise
from bitsandbytes.optim.adamw import AdamW
from torch import nn

from workflow.lib.distributed.sharded_files import DamagedError, Piece, piece_of
from workflow.lib.model.nf4_model import cut_of, local, local_range
from workflow.lib.settings.config import TrainConfig
from workflow.lib.settings.optimizers import ADAM, BLOCK_SIZE, OPTIMIZERS, State
from workflow.lib.training.muon import Matrices, Muon

Params = Mapping[str, nn.Parameter]


class Rule(Protocol):
    """Updates some of the shards, and keeps their states."""

    device_decides: bool

    def step(self, count: int, *, lr: float, unless: torch.Tensor | None) -> None:
        """Update shards with a gradient, updated `count` times before, unless `unless` is true."""

    def state(self, name: str, key: str) -> torch.Tensor:
        """Return a state of a shard as it is stored; the live tensor."""


class ShardwiseOptimizer(torch.optim.Optimizer):
    """`train.optimizer` over this process's shards; `count` (): the updates so far."""

    def __init__(
        self, params: Params, train: TrainConfig, *, matrices: Mapping[str, int] | None = None
    ) -> None:
        """params: by name, sharded. matrices: those that are an adapter's A or B, and how many
        matrices each holds. States are made at once, so that a checkpoint can be read into them."""
        super().__init__(params.values(), {"lr": train.learning_rate})
        self.count = torch.zeros((), dtype=torch.int64)
        self._begun = False
        self._params = dict(params)
        self._shards = {name: nn.Parameter(_shard(param)) for name, param in params.items()}
        kind, matrices = OPTIMIZERS[train.optimizer], matrices or {}
        self._states = {n: kind.matrices if n in matrices else kind.others for n in params}
        self._rules = BUILDERS[train.optimizer](self._params, self._shards, matrices, train)
        self._rule_of = {name: rule for names, rule in self._rules for name in names}
        self._scales = {name: self._padded_scales(name) for name in params}

    def _padded_scales(self, name: str) -> dict[str, torch.Tensor]:
        """Put the scales of blockwise states into equal buffers, so that they are one tensor."""
        param, shard, buffers = self._params[name], self._shards[name], {}
        for state in self._states[name]:
            if state.in_blocks:
                buffer = shard.new_zeros(_blocks(param.shape, cuts=cut_of(param)[0]))
                buffers[state.name] = buffer
                rule = self._rule_of[name]
                if shard.numel() and isinstance(rule, _AdamW8bit):
                    rule.scales_in(buffer, name, state.name)
        return buffers

    @property
    def device_decides(self) -> bool:
        """Whether the device itself can leave an update."""
        return all(rule.device_decides for _, rule in self._rules)

    def begin(self, *, unless: torch.Tensor) -> None:
        """Start the update where the device decides on it, so that it need not wait for the host.
        unless: () bool on the device. `step` completes the update; without it nothing has happened
        if `unless` is true."""
        self._begun = self.device_decides
        if self._begun:
            self._update(unless)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or zero those of this process's shards, by one launch."""
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
        for _, rule in self._rules:
            rule.step(int(self.count), lr=group["lr"], unless=unless)

    def pieces(self, name: str, *, rank: int) -> dict[str, Piece]:
        """Return this process's part of a parameter's states, and of their scales. The scales are
        (processes, blocks). All are the live tensors."""
        param = self._params[name]
        weight = piece_of(param.detach(), rank=rank)
        pieces = {
            state.name: replace(weight, local=self._state(name, state))
            for state in self._states[name]
        }
        cuts, cut = cut_of(param)
        for state_name, scales in self._scales[name].items():
            row = scales.view(1, -1)
            shape = (cuts, len(scales))
            pieces[f"{state_name}_absmax"] = Piece(row, (cut, 0), shape, weight.mine)
        return pieces

    def _state(self, name: str, state: State) -> torch.Tensor:
        """Return a state of this process's shard."""
        shard = self._shards[name]
        if not shard.numel():  # for which bitsandbytes keeps nothing
            return shard.detach().to(torch.uint8 if state.element_bytes == 1 else torch.float32)
        return self._rule_of[name].state(name, state.name)

    @torch.no_grad()
    def requantize_(self, name: str, stored: Mapping[str, torch.Tensor]) -> None:
        """Take moments of 8 bits that other processes' cuts have quantized; `stored`: whole, named
        as in `pieces`. Raises `DamagedError` if their shapes do not belong to the parameter."""
        param = self._params[name]
        start, stop = local_range(param)
        for state in self._states[name]:
            key = state.name
            code = create_dynamic_map(signed=key == "exp_avg")
            decoded = _decoded(stored[key], stored[f"{key}_absmax"], code, shape=param.shape)
            if start == stop:
                continue
            shard = decoded[start:stop].contiguous()
            quantized, found = quantize_blockwise(shard, code=code, blocksize=BLOCK_SIZE)
            values = self._state(name, state)
            values.copy_(quantized.view_as(values))
            self._scales[name][key][: len(found.absmax)].copy_(found.absmax)


class _AdamW:
    """torch's own, fused."""

    device_decides = True

    def __init__(self, shards: Params, train: TrainConfig) -> None:
        self._shards = {name: shard for name, shard in shards.items() if shard.numel()}
        self._adamw = torch.optim.AdamW([*self._shards.values()], **_of_adam(train), fused=True)
        for shard in self._shards.values():
            step = torch.zeros((), device=shard.device)
            moments = {state.name: torch.zeros_like(shard) for state in ADAM}
            self._adamw.state[shard] = {"step": step, **moments}
        self._count = 0

    def step(self, count: int, *, lr: float, unless: torch.Tensor | None) -> None:
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

    def state(self, name: str, key: str) -> torch.Tensor:
        values: torch.Tensor = self._adamw.state[self._shards[name]][key]
        return values


class _AdamW8bit:
    """That of bitsandbytes."""

    device_decides = False

    def __init__(self, shards: Params, train: TrainConfig) -> None:
        self._shards = {name: shard for name, shard in shards.items() if shard.numel()}
        params = [*self._shards.values()]
        self._adamw = AdamW(params, **_of_adam(train), optim_bits=8, min_8bit_size=1)
        (group,) = self._adamw.param_groups
        for index, shard in enumerate(params):
            self._adamw.init_state(group, shard, 0, index)

    def step(self, count: int, *, lr: float, unless: torch.Tensor | None) -> None:
        assert unless is None, "bitsandbytes updates always"
        (group,) = self._adamw.param_groups
        group["lr"] = lr
        for state in self._adamw.state.values():
            state["step"] = count
        self._adamw.step()

    def state(self, name: str, key: str) -> torch.Tensor:
        values: torch.Tensor = self._adamw.state[self._shards[name]][IN_BITSANDBYTES[key]]
        return values

    def scales_in(self, buffer: torch.Tensor, name: str, key: str) -> None:
        """Keep the scales of a state in a buffer, which may be longer."""
        state, scales = self._adamw.state[self._shards[name]], IN_BITSANDBYTES[key]
        scales = scales.replace("state", "absmax")
        state[scales] = buffer[: len(state[scales])]


IN_BITSANDBYTES = {"exp_avg": "state1", "exp_avg_sq": "state2"}


def _of_adam(train: TrainConfig) -> dict[str, Any]:
    """Return what both implementations call by the same names."""
    return {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_eps,
        "weight_decay": train.weight_decay,
    }


def _muon(
    params: Params, shards: Params, matrices: Mapping[str, int], train: TrainConfig
) -> list[tuple[Params, Rule]]:
    """Muon for the adapter's matrices, AdamW for all else, as torch recommends."""
    of_muon = {name: param for name, param in params.items() if name in matrices}
    muon = Muon(
        of_muon,
        shards,
        matrices={n: Matrices(k, in_columns=".lora_B." in n) for n, k in matrices.items()},
        momentum=train.muon_momentum,
        weight_decay=train.weight_decay,
        match_adamw=train.muon_adjust_lr == "match_rms_adamw",
    )
    others = {name: shard for name, shard in shards.items() if name not in matrices}
    beside: list[tuple[Params, Rule]] = [(others, _AdamW(others, train))] if others else []
    return [(of_muon, muon), *beside]


Builder = Callable[[Params, Params, Mapping[str, int], TrainConfig], list[tuple[Params, Rule]]]
BUILDERS: dict[str, Builder] = {
    "adamw": lambda params, shards, matrices, train: [(shards, _AdamW(shards, train))],
    "adamw_8bit": lambda params, shards, matrices, train: [(shards, _AdamW8bit(shards, train))],
    "muon": _muon,
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
