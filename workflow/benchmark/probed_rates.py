"""The probe: a machine's measured rates in the operations of a step.

Shapes are the same on all machines, as results are compared with one machine's
(`planning.timing.rates`). A GPU is timed in CUDA graphs of several calls, so that Python does not
count. Units: FLOP/s, bytes/s, calls/s."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from bitsandbytes.functional import quantize_4bit
from torch.nn.attention.varlen import varlen_attn

from workflow.lib.kernels.nf4.decode import NF4Data, dequantize_nf4
from workflow.lib.planning.probes import ATTENTIONS, Measured

HIDDEN, FEED_FORWARD, HEADS, KEY_HEADS, HEAD = 4096, 14336, 32, 8, 128
TOKENS = 4096
SHAPES = ((HIDDEN, HIDDEN), (HIDDEN, FEED_FORWARD), (FEED_FORWARD, HIDDEN))
CPU_TOKENS, CPU_SHAPES = 512, ((512, 512), (512, 2048), (2048, 512))
MOVED = 2**28  # bytes that an addition reads and writes; a fourth of it on a CPU
SMALL = 2**16  # the same, of an addition that takes only its start
COPIED, COPIES = 2**26, 8  # bytes of a copy to the host or back, and copies at once
TIMES = 9  # timings of a call
PASSES, PASSES_TIMES = 100, 60  # of a small module, at once; few are disturbed by other programs
WARM_S = 0.3


def probed(device: torch.device) -> dict[str, Measured]:
    """Return this process's rates by name, as `planning.timing.rates` reads them; all visible GPUs
    copy to the host at once. Takes a minute on a GPU, 15 s on a CPU."""
    if device.type == "cpu":
        x = torch.randn(MOVED // 48), torch.randn(MOVED // 48)
        out = torch.empty_like(x[0])
        return {
            "matmul": _matmul(_by_cpu, device, torch.float32, CPU_TOKENS, CPU_SHAPES),
            "memory": _rate(MOVED / 4, _by_cpu(partial(torch.add, *x, out=out))),
            "python": _rate(PASSES, _by_python(device)),
        }
    return dict(_gpu_rates(device))


def _gpu_rates(device: torch.device) -> Iterator[tuple[str, Measured]]:
    yield "matmul", _matmul(_by_graph, device, torch.bfloat16, TOKENS, SHAPES)
    if torch.cuda.get_device_capability(device) >= (8, 9):
        yield "matmul in 8 bits", _matmul(_by_graph, device, torch.float8_e4m3fn, TOKENS, SHAPES)
    for name, (documents, length) in ATTENTIONS.items():
        yield name, _attention(device, documents, length)
    yield "decoding", _decoding(device)
    yield "memory", _rate(MOVED, _by_graph(_addition(device, MOVED), 20))
    yield "graphs", _rate(1, _by_graph(_addition(device, SMALL), 20))
    yield "python", _rate(PASSES, _by_python(device))
    count = torch.cuda.device_count()
    yield "host", _rate(2 * COPIED * COPIES, _by_copies(count))
    if count > 1:
        yield "collective", _collective(count)


def _matmul(
    timed: Callable[..., list[float]],
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    shapes: tuple[tuple[int, int], ...],
) -> Measured:
    """FLOP/s of x W^T over the shapes of a layer, in and out."""
    flop, seconds = 0.0, [0.0] * TIMES
    unit_scale = torch.ones((), device=device)
    for width, out in shapes:
        x, weight = (torch.randn(n, width, device=device).to(dtype) for n in (tokens, out))
        call = partial(torch.matmul, x, weight.t())
        if dtype.itemsize == 1:
            in_8_bits = partial(torch._scaled_mm, scale_a=unit_scale, scale_b=unit_scale)
            call = partial(in_8_bits, x, weight.t(), out_dtype=torch.bfloat16)
        flop += 2.0 * tokens * width * out
        seconds = [sum(pair) for pair in zip(seconds, timed(call), strict=True)]
    return _rate(flop, seconds)


def _attention(device: torch.device, documents: int, length: int) -> Measured:
    """FLOP/s of causal attention, forward and backward (3.5 times the forward's)."""
    q, k, v = (
        torch.randn(documents * length, heads, HEAD, device=device, dtype=torch.bfloat16)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    bounds = torch.arange(documents + 1, device=device, dtype=torch.int32) * length
    gradient = torch.ones_like(q)

    def forward_and_backward() -> None:
        out = varlen_attn(q, k, v, bounds, bounds, length, length, window_size=(-1, 0))
        torch.autograd.grad(out, inputs, gradient)

    flop = 3.5 * 4.0 * documents * length * HEADS * HEAD * (length + 1) / 2
    return _rate(flop, _by_graph(forward_and_backward, 3))


def _decoding(device: torch.device) -> Measured:
    """Bytes/s, read and written, of NF4 weights with nested scales."""
    out = torch.randn(FEED_FORWARD, HIDDEN, device=device, dtype=torch.bfloat16)
    packed, state = quantize_4bit(out, quant_type="nf4", compress_statistics=True)
    decode = partial(dequantize_nf4, out, NF4Data.of(packed, state))
    return _rate(2.5 * out.numel(), _by_graph(decode))


def _addition(device: torch.device, moved_bytes: int) -> Callable[[], object]:
    x, y, out = (
        torch.ones(moved_bytes // 6, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    return partial(torch.add, x, y, out=out)


def _collective(count: int) -> Measured:
    """Bytes/s that a GPU receives in an all-gather, by NCCL in one process."""
    devices = [torch.device("cuda", number) for number in range(count)]
    parts = [torch.ones(COPIED, dtype=torch.uint8, device=device) for device in devices]
    wholes = [torch.empty(count * COPIED, dtype=torch.uint8, device=x.device) for x in parts]
    gather = partial(torch.cuda.nccl.all_gather, parts, wholes)
    return _rate(COPIED * (count - 1), _timed(gather, partial(_wait, count)))


def _by_copies(count: int) -> list[float]:
    """Seconds of `COPIES` to the host and as many back, of each GPU at once."""
    pairs = [
        (
            torch.ones(COPIED, dtype=torch.uint8, device=torch.device("cuda", number)),
            torch.ones(COPIED, dtype=torch.uint8, pin_memory=True),
        )
        for number in range(count)
    ]

    def copies() -> None:
        for _ in range(COPIES):
            for on_gpu, on_host in pairs:
                on_host.copy_(on_gpu, non_blocking=True)
                on_gpu.copy_(on_host, non_blocking=True)

    return _timed(copies, partial(_wait, count))


def _by_python(device: torch.device) -> list[float]:
    """Seconds of small forward and backward passes, bound by Python and not by the device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = torch.nn.Linear(16, 16, device=device, dtype=dtype)
    x = torch.randn(4, 16, device=device, dtype=dtype, requires_grad=True)

    def passes() -> None:
        for _ in range(PASSES):
            layer(x).sum().backward()

    if device.type == "cpu":
        return _by_cpu(passes, PASSES_TIMES)
    return _timed(passes, partial(_wait, 1), times=PASSES_TIMES)


def _by_cpu(call: Callable[[], object], times: int = TIMES) -> list[float]:
    """Seconds of this thread, without other programs': a process' threads work in step."""
    return _timed(call, lambda: None, clock=time.thread_time, times=times)


def _by_graph(call: Callable[[], object], count: int = 10) -> list[float]:
    """Seconds of a call within a CUDA graph of `count` of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(TIMES)] for _ in "ab")
    until = time.perf_counter() + WARM_S
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    for start, end in zip(starts, ends, strict=True):
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    pairs = zip(starts, ends, strict=True)
    return [start.elapsed_time(end) / 1e3 / count for start, end in pairs]


def _timed(
    call: Callable[[], object],
    wait: Callable[[], None],
    *,
    clock: Callable[[], float] = time.perf_counter,
    times: int = TIMES,
) -> list[float]:
    """Seconds of calls, each until `wait` returns."""
    call()
    seconds = []
    for _ in range(times):
        wait()
        began = clock()
        call()
        wait()
        seconds.append(clock() - began)
    return seconds


def _wait(count: int) -> None:
    for number in range(count):
        torch.cuda.synchronize(number)


def _rate(amount: float, seconds: list[float]) -> Measured:
    """Return the rate by the median; it is repeatable if the medians of three thirds agree."""
    middle, size = statistics.median(seconds), len(seconds) // 3
    thirds = [statistics.median(seconds[i : i + size]) for i in (0, size, 2 * size)]
    return Measured(value=amount / middle, spread=(max(thirds) - min(thirds)) / middle)
