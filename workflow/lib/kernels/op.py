"""`Op`: a GPU kernel and torch's operations that compute the same, and `OPS`, the table of all.

Compilers break some kernels, so each is compared with its reference (`Op.case`) at its first use on
a GPU. CPUs use the reference, a recorded device the kernel, which computes nothing there. If one
process of a run cannot use a kernel, no process uses it (`distributed.world`)."""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from workflow.lib.kernels.kernel_launch import INSTALLED
from workflow.lib.system.device_types import GPUS, RECORDED

logger = logging.getLogger("workflow")


class Key(NamedTuple):
    """An op's name, and the variant that its kernel is compiled for."""

    name: str
    variant: tuple[Hashable, ...]


class Decision:
    """The decision of one process on which kernels it uses."""

    def __init__(self) -> None:
        self._outcomes: dict[tuple[Key, torch.device], bool] = {}
        self.faults: dict[Key, str] = {}
        """Kernels that are turned off, and why."""

    def allows(self, key: Key, device: torch.device, fault: Callable[[], str | None]) -> bool:
        """Whether a kernel is used on a device. fault: checks it and returns why not."""
        allowed = self._outcomes.get((key, device))
        if allowed is None:
            allowed = key not in self.faults and self._is_right(key, fault())
            self._outcomes[key, device] = allowed
        return allowed

    def _is_right(self, key: Key, fault: str | None) -> bool:
        if fault is None:
            return True
        if fault not in self.faults.values():  # a fault of all kernels is logged once
            logger.warning("The kernel for %s is not used: %s.", key.name, fault)
        self.faults[key] = fault
        return False

    def adopt(self, faults: dict[Key, str]) -> None:
        """Turn these kernels off, too. faults: of all processes."""
        for key in faults.keys() - self.faults.keys():
            reason = f"on another process: {faults[key]}"
            logger.warning("The kernel for %s is not used: %s.", key.name, reason)
        self.faults = faults
        self._outcomes = {k: right and k[0] not in faults for k, right in self._outcomes.items()}


DECISION = Decision()


Variant = tuple[Hashable, ...]
Case = tuple[Any, ...]
P = ParamSpec("P")
R = TypeVar("R")

TOLERANCE = 0.03  # of the largest value; bf16 is off by up to 0.008
WITHOUT = (
    "steps take longer, and the loss more memory, which preflight counts if train.fused_loss is "
    "false"
)


@dataclass(frozen=True, eq=False)
class Op(Generic[P, R]):
    """A kernel and its reference; the first argument is a tensor, or a tuple with one first."""

    name: str  # in the log
    reference: Callable[P, R]
    kernel: Callable[P, R]
    case: Callable[..., Case]
    """Small arguments for a device and a variant; the same values on any device. Gradients are
    compared, too, for arguments that require them."""
    variant: Callable[P, Variant] = lambda *args, **_: (first_tensor(args).dtype,)
    """The parts of a kernel's arguments that change its program: a dtype, a width."""
    supports: Callable[P, bool] = lambda *_, **__: True
    """Whether the kernel takes these arguments."""
    exact: bool = False  # whether the two give the same bits
    backward: "Op[Any, Any] | None" = None
    """The op of its gradients, if they have their own: both take kernels or none."""

    def __post_init__(self) -> None:
        assert self.name not in OPS, f"two ops are named {self.name}"
        OPS[self.name] = self

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        runs = self.kernel if self.takes_kernel(*args, **options) else self.reference
        return runs(*args, **options)

    def takes_kernel(self, *args: P.args, **options: P.kwargs) -> bool:
        """Whether the kernel computes these arguments."""
        device = first_tensor(args).device
        if device.type not in GPUS or not self.supports(*args, **options):
            return False
        return self.works_on(device, *self.variant(*args, **options))

    def works_on(self, device: torch.device, *variant: Hashable) -> bool:
        """Whether the kernel's variant is right on a device; checked once."""
        if device.type not in GPUS or device.type == RECORDED:
            return device.type == RECORDED
        key = Key(self.name, variant)
        if not DECISION.allows(key, device, lambda: self.fault(device, *variant)):
            return False
        return self.backward is None or self.backward.works_on(device, *variant)

    def fault(self, device: torch.device, *variant: Hashable) -> str | None:
        """Check the kernel; return why it cannot be used, None if it can."""
        if not INSTALLED:
            return f"Triton is not installed; {WITHOUT}"
        # A recomputed layer would take tensors of the check's backward for its own.
        with gradients_alone():
            return self._tried(device, *variant)

    def _tried(self, device: torch.device, *variant: Hashable) -> str | None:
        try:
            made = _results(self.kernel, self.case(device, *variant))
        # Any error: a missing compiler or cache folder and an unknown GPU raise Triton's own
        # classes, and a run continues without the kernel.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            return f"it cannot be built here ({reason}); {WITHOUT}"
        arguments = self.case(device, *variant)
        expected = _results(self.reference, arguments if self.exact else _in_fp32(arguments))
        if all(self.agree(x, y) for x, y in zip(made, expected, strict=True)):
            return None
        return f"it computes something else on this GPU; {WITHOUT}"

    def agree(self, made: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether the kernel's result is the reference's, up to rounding."""
        if self.exact:
            return torch.equal(made, expected)
        difference = (made.float() - expected.float()).abs().max()
        return bool(difference <= TOLERANCE * expected.float().abs().max())


OPS: dict[str, Op[Any, Any]] = {}


def drawn(device: torch.device, dtype: torch.dtype, *sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return a tensor of each size for a case, the same normal values on any device."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=draw).to(device, dtype) for size in sizes]


def first_tensor(args: Iterable[Any]) -> torch.Tensor:
    first: Any = next(iter(args))
    return first if isinstance(first, torch.Tensor) else first_tensor(first)


@torch.no_grad()
def _results(function: Callable[..., Any], args: Case) -> list[torch.Tensor]:
    """Return a function's tensors, and the gradients of the arguments that require them, for a
    random gradient of the first."""
    leaves = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    if not leaves:
        return [*_tensors(function(*args))]
    with torch.enable_grad():
        output = function(*args)
    draw = torch.Generator().manual_seed(1)
    slope = torch.randn(output.shape, generator=draw).to(torch.bfloat16)
    slope = slope.to(output.device, output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, slope)]


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _tensors(part)


def _in_fp32(value: Any) -> Any:
    """Return arguments with all 16-bit tensors in fp32."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in (torch.bfloat16, torch.float16):
            return value
        return value.detach().float().requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        made = map(_in_fp32, value)
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value


@contextmanager
def gradients_alone() -> Iterator[None]:
    """Within a model's forward, compute gradients hidden from its hooks of saved tensors, which
    count, round or move them."""
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


Forward = Callable[..., torch.Tensor]
Backward = Callable[..., torch.Tensor | Iterable[torch.Tensor]]


def keeping(tensors: int, forward: Forward, backward: Backward | None = None) -> Forward:
    """Return `forward`, as one node that keeps its first arguments, so many tensors or None.
    backward: gradients of the first of them, from the result's gradient and all arguments; None:
    autograd's, from a recomputation."""
    apply: Forward = _KeepingInputs.apply

    def node(*arguments: Any) -> torch.Tensor:
        others = arguments[tensors:]
        back = backward and (lambda grad, *kept: backward(grad, *kept, *others))
        return apply(lambda *kept: forward(*kept, *others), back, *arguments[:tensors])

    return node


class _KeepingInputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Forward, backward: Backward | None, *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        # With a backward the forward is dropped: it may hold tensors.
        ctx.functions = None if backward else forward, backward
        ctx.save_for_backward(*tensors)
        output = forward(*tensors)
        return output if backward else output.detach()  # no view: a family may change it in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        forward, backward = ctx.functions
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if backward is not None:
            result = backward(grads[0], *tensors)
            made = [result] if isinstance(result, torch.Tensor) else [*result]
            return None, None, *made, *[None] * (len(tensors) - len(made))
        again = [
            None if x is None else x.detach().requires_grad_(needed_inputs)
            for x, needed_inputs in zip(tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            output = forward(*again)
        needed_inputs = [x for x in again if x is not None and x.requires_grad]
        result = iter(torch.autograd.grad(output, needed_inputs, grads))
        return None, None, *(next(result) if needed_inputs else None for needed_inputs in needed)
