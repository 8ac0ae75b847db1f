"""A simulated GPU: torch's device for extensions (`PrivateUse1`), with numbered streams.

Its tensors are fake (`torch._subclasses.FakeTensorMode`), and it has what engine, FSDP2 and torch
use of `torch.cuda`. A process keeps it, so recordings have one (`recording_process`)."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from workflow.lib.recording.known_results import KnownResults
from workflow.lib.recording.layer_tape import LayerTape
from workflow.lib.system.device_types import RECORDED


class RecordedCapture:
    """Replaces `cuda_capture.CudaCapture`: `torch.cuda.graph` frees cached pages and captures
    in a pool of its own, here another stream's."""

    def __init__(self, tape: LayerTape) -> None:
        self._tape, self._stream = tape, RecordedStream(computes=True)

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run `function`, whose allocations are noted; the returned replay allocates nothing, and
        counts its work."""
        self._tape.empty_cache()
        with recorded_gpu().stream(self._stream), self._tape.counted_apart() as amounts:
            result = function()

        def replay() -> torch.Tensor:
            self._tape.count_again(amounts)
            return result

        return replay


# Operations with GPU kernels of their own; on other devices torch composes them of others, with
# temporaries.
OWN_KERNELS = ("silu_backward", "mish_backward", "_fused_rms_norm")
FLASH_HEAD = 256  # the widest, torch 2.11 to 2.13 (`can_use_flash_attention`)
COMPUTING = 0  # the number of the stream that computes


def _does_nothing(*_: Any) -> None:
    """Replaces a method of a device on which nothing runs."""


class RecordedEvent:
    """An event that is always done, as nothing runs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> "RecordedEvent":
        return self

    wait = synchronize = _does_nothing

    def query(self) -> bool:
        return True


class RecordedStream:
    """A queue of a device: its number names the memory pool of its tensors."""

    made = COMPUTING

    def __init__(self, *_: Any, computes: bool = False, **__: Any) -> None:
        """computes: it is the main stream, beside which all others run."""
        self.computes = computes
        self.stream_id = RecordedStream.made
        RecordedStream.made += 1

    wait_stream = wait_event = synchronize = _does_nothing

    def record_event(self, *_: Any) -> RecordedEvent:
        return RecordedEvent()


class RecordedGpu:
    """The result of `torch.get_device_module` for the device."""

    __name__ = f"torch.{RECORDED}"
    Stream, Event = RecordedStream, RecordedEvent

    def __init__(self) -> None:
        self._stream = RecordedStream(computes=True)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.results = KnownResults(self.mode)
        self.kernels = torch.library.Library("aten", "IMPL")

    def current_stream(self, *_: Any) -> RecordedStream:
        return self._stream

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    @contextmanager
    def is_accelerator(self) -> Iterator[None]:
        """Give this device's stream to FSDP2's end of a backward, which asks torch for it to wait
        for weights that no layer took (2.13): torch's own cannot wait for `RecordedEvent`."""
        before = torch.accelerator.current_stream
        torch.accelerator.current_stream = self.current_stream  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.accelerator.current_stream = before

    @contextmanager
    def device(self, *_: Any) -> Iterator[None]:
        yield

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    set_device = synchronize = empty_cache = set_rng_state = _does_nothing
    manual_seed = manual_seed_all = _does_nothing

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@functools.cache
def recorded_gpu() -> RecordedGpu:
    """Give this process the device `device_types.RECORDED`; return its module."""
    gpu = RecordedGpu()
    _setup_privateuseone_for_python_backend(RECORDED, backend_module=gpu)
    # `fake` collectives do nothing on this device either.
    dist.Backend.backend_capability[dist.Backend.FAKE].append(RECORDED)
    dist.Backend.default_device_backend_map[RECORDED] = dist.Backend.FAKE
    for name in OWN_KERNELS:
        gpu.kernels.impl(name, _computes_nothing, "PrivateUse1")

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        with gpu.mode:
            made: torch.Tensor = torch.ops.aten.empty.memory_format(*args, **kwargs)
        return made

    gpu.kernels.impl("empty.memory_format", empty, "PrivateUse1")
    gpu.kernels.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    return gpu


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that torch chooses on GPUs: FlashAttention without a mask, in 16 bits and for its
    head widths (cuDNN's, which torch takes on some GPUs, keeps the same), else memory-efficient
    attention. FlashAttention needs no copies of keys and values for each head."""
    output: torch.Tensor
    widths = {query.shape[-1], value.shape[-1]}
    if mask is None and query.itemsize == 2 and len(widths) == 1 and max(widths) <= FLASH_HEAD:
        output, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, scale=scale
        )
        return output
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, float("-inf"))
    if mask is not None:
        mask = mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
    output, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, torch.is_grad_enabled(), dropout, causal, scale=scale
    )
    return output


def _computes_nothing(*_: Any, **__: Any) -> None:
    raise NotImplementedError("the tensors of a recorded GPU are fake: nothing is computed on it")
