"""How fast kinds of GPUs do what a recording counts (`planning.work`): one row for each kind.

A row of `MEASURED` is of a GPU on which steps or operations were measured. Of any other the rates
are scaled by data sheets, and `Rates.source` says so. No rate is of a model or a family of models.
Units: FLOP/s, bytes/s, seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workflow.lib.planning import work as kinds
from workflow.lib.system.gpu_models import BY_NAME, GpuModel


@dataclass(frozen=True)
class Rates:
    """What one kind of GPU reaches. All are above 0."""

    flops: Mapping[str, float]
    """FLOP/s of each kind of `planning.work` with matmuls."""
    memory: float  # bytes/s read and written
    decoding: float  # bytes/s; the processors bound it where the memory is fast
    gap_s: float  # from a kernel to the next
    launch_s: float  # of Python, for each kernel that it launches
    collective_launch_s: float  # the same, with the hooks of FSDP2 around a collective
    pause_s: float  # to a step's first kernel, where the host reads the loss before it
    host: float  # bytes/s from or to page-locked host memory
    collective: float  # bytes of memory traffic for each that comes beside the computation
    source: str = ""  # what the row rests on, in words


# GPUs of compute capability 9.0 and above, whose documents of one length cuDNN serves.
CUDNN_SERVES = ("H100", "H200", "B200", "RTX 5090")
_FLOPS = {
    kinds.MATMUL: 707e12,
    kinds.MATMUL_8: 1239e12,
    kinds.MATMUL_32: 20.1e12,
    kinds.GROUPED: 495e12,
    kinds.GROUPED_8: 722e12,
    kinds.ATTENTION: 342e12,
    kinds.EQUAL: 500e12,
    kinds.BROAD: 237e12,
    kinds.FLEX: 171e12,
    kinds.WIDE: 75.7e12,
    kinds.MASKED: 130e12,
    kinds.DELTA_RULE: 32.8e12,
    kinds.STATE_SPACE: 72.3e12,
}
H200 = Rates(
    flops=_FLOPS,
    memory=3.32e12,
    decoding=2.35e12,
    gap_s=2.6e-6,
    launch_s=45e-6,
    collective_launch_s=1.5e-3,
    pause_s=9e-3,
    host=29.4e9,
    collective=3.8,
    source="fitted to measurements on NVIDIA H200",
)
H100 = replace(
    H200,
    memory=2.76e12,
    decoding=2.42e12,
    host=41.5e9,
    source="fitted to measurements on NVIDIA H100 80GB HBM3",
)
MEASURED = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}


def rates_of(gpu: GpuModel) -> Rates:
    """Return the rates of a GPU; of one that was not measured an H200's, scaled by data sheets."""
    known, sheet = MEASURED["NVIDIA H200"], BY_NAME["NVIDIA H200"]
    if gpu.name in MEASURED:
        return MEASURED[gpu.name]
    computing, moving = gpu.flops / sheet.flops, gpu.bandwidth / sheet.bandwidth
    flops = {kind: rate * computing for kind, rate in known.flops.items()}
    if not any(word in gpu.name for word in CUDNN_SERVES):
        flops[kinds.EQUAL] = flops[kinds.ATTENTION]
    return replace(
        known,
        flops=flops,
        memory=known.memory * moving,
        decoding=min(known.decoding, known.memory * moving),
        host=known.host * gpu.host_bandwidth / sheet.host_bandwidth,
        source=f"scaled by data sheets to {gpu.name}, not measured there",
    )
