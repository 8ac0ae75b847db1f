"""The load-balancing loss of a mixture's routers, over the tokens of all processes.

As Transformers' `load_balancing_loss_func` (Switch Transformer, arXiv 2101.03961, equations 4 to
6): E sum_e f_e p_e. f_e is how often a token has expert e among its k most probable ones (without
gradient), p_e its mean probability; means over tokens, without padding, and layers.

Both are sums over all processes and the micro-batches of a step so far (arXiv 2501.11873): the
step's loss is exact, and so is the last micro-batch's gradient. The backward of the router's
weights computes the gradient of p from its logits: nothing else is kept, nothing waits."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.model.experts.fused_experts import Arguments, FusedExperts
from workflow.lib.model.tried_classes.magnitudes import agree, magnitudes
from workflow.lib.system.errors import UserError

TOKENS = 7  # for comparison with a family's own function


class Sums(NamedTuple):
    """The parts of the loss, sums over tokens and layers, float64."""

    chosen: torch.Tensor  # (experts,): how often each was among the k most probable
    probabilities: torch.Tensor  # (experts,)
    tokens: torch.Tensor  # ()


@dataclass(frozen=True)
class BalanceSettings:
    """A family's settings of the loss."""

    coefficient: float
    num_experts: int
    top_k: int


@dataclass
class _Tensors:
    """Tensors of the step on one device, at fixed addresses: a CUDA graph may read them."""

    own: torch.Tensor  # of this process's micro-batch, as `_sums` reads it
    step: torch.Tensor  # of the step so far, over all processes
    slopes: torch.Tensor  # (experts,) fp32: the loss's gradient by a token's probabilities
    factor: torch.Tensor  # () float64: factor of f_e in them
    real: torch.Tensor  # (T,) fp32, of each micro-batch: 1 for a token, 0 for padding


class RouterBalance:
    """The load-balancing loss of a model's routers in training; evaluation does not compute it."""

    def __init__(self, settings: BalanceSettings, *, layers: int) -> None:
        """layers: number of layers with a router."""
        self._settings, self._layers = settings, layers
        self._group: dist.ProcessGroup | None = None
        self._counting = False
        self._made: _Tensors | None = None
        self.training = True
        """Whether forward passes add the gradient; the routers may be in evaluation then."""

    @property
    def _tensors(self) -> _Tensors:
        assert self._made is not None, "no step has begun"
        return self._made

    def follow_(self, model: nn.Module, routers: Mapping[str, str]) -> None:
        """Balance these routers of a model, given by the path of their experts."""
        for path, router in routers.items():
            layer = _BalancedLayer(self, experts=self._settings.num_experts)
            model.get_submodule(router).register_forward_hook(layer.note)
            model.get_submodule(path).register_forward_pre_hook(layer.weigh, with_kwargs=True)

    def share_(self, group: dist.ProcessGroup) -> None:
        """Sum over all processes of a group, which have equally many micro-batches."""
        self._group = group

    def begin_step_(self, *, divisor: float, tokens: int, device: torch.device) -> None:
        """Begin a step of `tokens` without padding, everywhere; divisor: of the summed losses."""
        experts = self._settings.num_experts
        if self._made is None:
            own = torch.zeros(2 * experts + 1, dtype=torch.float64, device=device)
            slopes = torch.zeros(experts, device=device)
            factor = torch.zeros((), dtype=torch.float64, device=device)
            self._made = _Tensors(own, torch.zeros_like(own), slopes, factor, slopes[:0])
        self._tensors.step.zero_()
        weight = self._settings.coefficient * experts * divisor
        self._tensors.factor.fill_(weight / (tokens * self._layers))

    @contextmanager
    def counting(self, lengths: torch.Tensor | None, num_tokens: int) -> Iterator[None]:
        """Count the tokens of a micro-batch within the block. Collective at its end. lengths:
        (rows,) int64, tokens of each row before its padding; num_tokens: of all rows."""
        assert lengths is not None, "a micro-batch must say where its padding begins"
        tensors = self._tensors
        positions = torch.arange(num_tokens // len(lengths), device=lengths.device)
        tensors.real = (positions < lengths[:, None]).flatten().float()
        tensors.own.zero_()
        _sums(tensors.own).tokens.add_(tensors.real.sum())
        self._counting = True
        try:
            yield
        finally:
            self._counting = False
        self._add_up()

    @torch.no_grad()
    def _add_up(self) -> None:
        tensors = self._tensors
        if self._group is not None:
            dist.all_reduce(tensors.own, group=self._group)
        tensors.step += tensors.own
        sums = _sums(tensors.step)
        tensors.slopes.copy_(tensors.factor * sums.chosen / (sums.tokens * self._layers))

    @torch.no_grad()
    def count(self, logits: torch.Tensor) -> None:
        """Add a layer's tokens to the micro-batch's, given their logits (T, experts)."""
        if not self._counting:  # recomputation of a layer
            return
        probabilities = logits.float().softmax(dim=-1)
        best = probabilities.topk(self._settings.top_k, dim=-1).indices
        chosen = torch.zeros_like(probabilities).scatter_(1, best, 1.0)
        sums, real = _sums(self._tensors.own), self._tensors.real
        sums.chosen.add_(real @ chosen)
        sums.probabilities.add_(real @ probabilities)

    def joined(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's summed loss () with the balance in its gradient alone."""
        joined: torch.Tensor = _Joined.apply(loss, self)  # type: ignore[no-untyped-call]
        return joined

    def scale_slopes_(self, slope: torch.Tensor) -> None:
        """Multiply the balance's gradient by the slope of this micro-batch's loss."""
        self._tensors.slopes.mul_(slope)

    def gradient(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the loss's gradient by the logits (T, experts) of a layer."""
        slopes, real = self._tensors.slopes, self._tensors.real
        probabilities = logits.float().softmax(dim=-1)
        rising = slopes - (probabilities @ slopes)[:, None]
        return (probabilities * rising * real[:, None]).to(logits.dtype)

    def value(self) -> torch.Tensor:
        """Return the step's loss () float64 so far, without coefficient, the same everywhere."""
        sums = _sums(self._tensors.step)
        means = sums.tokens * self._layers
        product = (sums.chosen / means) @ (sums.probabilities / means)
        return self._settings.num_experts * product


def accumulated(micro_batches: int) -> str:
    """Return the notice on the loss's gradient in steps of several micro-batches."""
    return (
        "routers are balanced by the choices of the micro-batches until then, of "
        f"{micro_batches} a step: with another number of them (train.micro_batch_size, the number "
        "of processes) the result is slightly another"
    )


def _sums(flat: torch.Tensor) -> Sums:
    """Split (2 * experts + 1,) numbers into the parts of the loss."""
    experts = len(flat) // 2
    return Sums(flat[:experts], flat[experts:-1], flat[-1])


class _BalancedLayer:
    """Hooks of one layer, from the router's logits to the weights of its experts."""

    def __init__(self, balance: RouterBalance, *, experts: int) -> None:
        self._balance, self._experts = balance, experts
        self._logits: torch.Tensor | None = None

    def note(self, router: nn.Module, _: Any, output: Any) -> None:
        """Keep a router's logits: its output, or of a tuple the tensor with a column per expert, at
        any position (Granite's in Transformers 5.17 is last)."""
        if self._balance.training:
            outputs = (output,) if isinstance(output, torch.Tensor) else output
            wide = [x for x in outputs if x.is_floating_point() and x.shape[-1] == self._experts]
            assert wide, "a router returns no logits"
            self._logits = wide[0]

    def weigh(self, experts: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Count the layer's tokens, and attach the gradient to the weights of its experts."""
        if self._logits is None:
            return None
        assert isinstance(experts, FusedExperts)
        logits, self._logits = self._logits, None
        hidden, index, weights = Arguments(*args, **kwargs)
        assert logits.shape == (len(hidden), experts.num_experts), "these are no router's logits"
        self._balance.count(logits.detach())
        weighed = _Balanced.apply(weights, logits, self._balance)  # type: ignore[no-untyped-call]
        return (hidden, index, weighed), {}


class _Balanced(torch.autograd.Function):
    """Returns a router's weights; its backward gives the logits the balance's gradient."""

    @staticmethod
    def forward(
        ctx: Any, weights: torch.Tensor, logits: torch.Tensor, balance: RouterBalance
    ) -> torch.Tensor:
        ctx.balance = balance
        ctx.save_for_backward(logits)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (logits,) = ctx.saved_tensors
        return grads[0], ctx.balance.gradient(logits), None


class _Joined(torch.autograd.Function):
    """Returns a loss unchanged. Its backward precedes all layers', which need its slope."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, balance: RouterBalance) -> torch.Tensor:
        ctx.balance = balance
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.balance.scale_slopes_(grads[0])
        return grads[0], None


def family_coefficient(model: PreTrainedModel) -> float | None:
    """Return the coefficient of a family's own load-balancing loss; None if it has no such loss."""
    coefficient: float | None = getattr(model, "router_aux_loss_coef", None)
    return None if coefficient is None else float(coefficient)


def router_balance(
    model: PreTrainedModel, coefficient: float, routers: Mapping[str, str]
) -> RouterBalance:
    """Return the load-balancing loss of a model's routers, given by the path of their experts.
    Raises `UserError` if its family's loss is another one, or not of these routers."""
    family: Any = model
    settings = BalanceSettings(coefficient, family.num_experts, family.num_experts_per_tok)
    balance = RouterBalance(settings, layers=len(routers))
    experts = [m.num_experts for m in model.modules() if isinstance(m, FusedExperts)]
    same_layers = experts == [settings.num_experts] * len(routers)
    if not same_layers or not _computes_the_same(family, settings):
        raise UserError(
            f"train.router_aux_loss_coef: the load-balancing loss of {type(model).__name__} is not "
            "supported: it is another one than Transformers' load_balancing_loss_func of Mixtral. "
            "Set it to 0."
        )
    balance.follow_(model, routers)
    return balance


@torch.no_grad()
def _computes_the_same(model: nn.Module, settings: BalanceSettings) -> bool:
    """Compare the function beside the model's class with the engine's on random logits, with
    padding."""
    family_loss = getattr(inspect.getmodule(type(model)), "load_balancing_loss_func", None)
    if family_loss is None:
        return False
    draw = torch.Generator().manual_seed(0)
    logits = [torch.randn(TOKENS, settings.num_experts, generator=draw) for _ in range(2)]
    lengths = torch.tensor([TOKENS - 2])
    mask = (torch.arange(TOKENS) < lengths)[None].long()

    def own_value(magnitude: float) -> torch.Tensor:
        balance = RouterBalance(settings, layers=len(logits))
        balance.begin_step_(divisor=1, tokens=TOKENS - 2, device=torch.device("cpu"))
        with balance.counting(lengths, TOKENS):
            for layer in logits:
                balance.count(magnitude * layer)
        return balance.value().float()

    def family_value(magnitude: float) -> Any:
        scaled = tuple(magnitude * layer for layer in logits)
        return family_loss(scaled, settings.num_experts, settings.top_k, mask)

    return agree(family_value, own_value, at=magnitudes(family_loss), tolerance=1e-4)
