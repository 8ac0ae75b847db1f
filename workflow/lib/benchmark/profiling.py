"""Where the time of a training step goes on a GPU: kernels by kind, as torch's profiler sees them.

Kinds are told by the names of kernels. Those on other streams (communication, copies) run beside
the computing ones, so the kinds may add up to more than the step; `idle` is what is left of the
step when nothing at all runs.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from workflow.lib.artifacts.benchmark_record import Profile

# The first kind of which a kernel's name (in small letters) has one of the words.
KINDS = (
    ("communication", ("nccl",)),
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("dequantization", ("dequantize", "decode_eight_bits", "decode_transposed")),
    ("products", ("gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk", "cublas", "_product")),
    ("host copies", ("memcpy htod", "memcpy dtoh", "memcpy host", "memcpy device -> host")),
    ("device copies", ("memcpy", "memset", "copy", "cat", "fill", "chunk")),
)
OTHER = "elementwise and reductions"
LONGEST = 24  # kernels told by name
NAME_CHARS = 120


def profiled(work: Callable[[], Any], *, device: torch.device) -> Profile:
    """Return where the time of `work` goes on this GPU; on the CPU it has no kernels."""
    on_gpu = device.type == "cuda"  # alone, because recording what the host does slows it
    with profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    ) as recorded:
        began = time.monotonic()
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
        step_s = time.monotonic() - began
    spans = [
        (event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in recorded.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return summed(spans, step_s=step_s)


def summed(spans: Iterable[tuple[str, float, float]], *, step_s: float) -> Profile:
    """Return the summary of kernels (name, start, end), seconds, of a step that took `step_s`."""
    spans = list(spans)
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    for name, start, end in spans:
        kinds[kind(name)] += end - start
        kernels[name] += end - start
    calls = Counter(name for name, _, _ in spans)
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:LONGEST]
    return Profile(
        step_s=step_s,
        idle_s=max(0.0, step_s - _covered((start, end) for _, start, end in spans)),
        kinds=dict(sorted(kinds.items(), key=lambda item: -item[1])),
        kernels=[(name[:NAME_CHARS], seconds, calls[name]) for name, seconds in longest],
    )


def kind(name: str) -> str:
    """Return the kind of a kernel by its name."""
    small = name.lower()
    return next((kind for kind, words in KINDS if any(word in small for word in words)), OTHER)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
