"""Rates of kinds of GPUs for the work that a recording counts (`planning.work`): a row each.

A row of `MEASURED` is a GPU with measured steps or operations. Rates of any other are scaled by its
probe, else by data sheets, and `Rates.source` says so. No rate is of a model or a family of models.
Units: FLOP/s, bytes/s, seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from workflow.lib.planning import work as kinds
from workflow.lib.planning.probes import ATTENTIONS, COMMAND, Probe
from workflow.lib.system.gpu_models import BY_NAME, GpuModel

PYTHON, COPIES = "Python's speed", "copies to host memory"
UNSURE = (PYTHON, COPIES)
"""Parts that differ from host to host."""


@dataclass(frozen=True)
class Rates:
    """Rates of one kind of GPU. All are above 0."""

    flops: Mapping[str, float]
    """FLOP/s of each kind of `planning.work` with matmuls."""
    memory: float  # bytes/s read and written
    decoding: float  # bytes/s; the processors bound it where the memory is fast
    gap_s: float  # from a kernel to the next
    launch_s: float  # of Python, for each kernel that it launches
    prepared_launch_s: float  # the same, of experts and flex attention, whose arguments it checks
    collective_launch_s: float  # the same, with the hooks of FSDP2 around a collective
    pause_s: float  # to a step's first kernel, where the host reads the loss before it
    host: float  # bytes/s from or to page-locked host memory
    collective: float  # memory traffic in bytes for each byte beside the computation
    attention: float  # the same for each byte of attention: many read a block's keys
    source: str = ""  # basis of the row, in words
    # Spread factors that cover all stored steps: Python (a probe found 2,960 and 4,240 passes/s in
    # two runs on one host) and copies on other hosts, and a whole step by graphs.
    python_spread: float = 1.3
    host_spread: float = 1.7
    spread: float = 1.13

    def varied(self, power: int, part: str | None = None) -> "Rates":
        """Return the rates of a slow host (power 1), or a fast one (-1); part: of `UNSURE`, the
        only part that differs."""
        python = self.python_spread**power if part in (None, PYTHON) else 1.0
        host = self.host_spread**power if part in (None, COPIES) else 1.0
        return replace(
            self,
            launch_s=self.launch_s * python,
            prepared_launch_s=self.prepared_launch_s * python,
            collective_launch_s=self.collective_launch_s * python,
            pause_s=self.pause_s * python,
            host=self.host / host,
        )


@dataclass(frozen=True)
class CpuRates:
    """Rates of a process in fp32."""

    flops: float
    memory: float  # bytes/s
    call_s: float  # of an operation
    source: str

    def probed(self, probe: Probe) -> "CpuRates":
        """Return these, of `PROBED_CPU`, scaled by the same probe of another CPU."""
        ratios = probe.ratios(PROBED_CPU)
        return CpuRates(
            self.flops * ratios.get("matmul", 1.0),
            self.memory * ratios.get("memory", 1.0),
            self.call_s / ratios.get("python", 1.0),
            probe.basis,
        )


# Fitted to four steps of the demo (docs/predictions.md), and probed in the same minutes: AMD
# EPYC, one thread a process, torch 2.13, November 2026.
CPU = CpuRates(103e9, 15.5e9, 13.5e-6, "measured on one machine")
PROBED_CPU = {"matmul": 106e9, "memory": 46e9, "python": 32e3}
# A step in bfloat16 took 5.2 s in place of 9.4 (one CPU with AVX512-BF16, November 2026).
BFLOAT16_SPEEDUP = 9.4 / 5.2
# GPUs of compute capability 9.0 and above, where cuDNN computes documents of one length.
CUDNN_SERVES = ("H100", "H200", "B200", "RTX 5090")
_FLOPS = {
    kinds.MATMUL: 719e12,
    kinds.MATMUL_8: 1320e12,
    kinds.MATMUL_32: 21.6e12,
    kinds.GROUPED: 555e12,
    kinds.GROUPED_8: 779e12,
    kinds.ATTENTION: 221e12,
    kinds.EQUAL: 526e12,
    kinds.BROAD: 444e12,
    kinds.FLEX: 151e12,
    # of the kernels alone, nine lists of documents (H200, 2026-11-30); steps are within 5%
    kinds.SHORT: 474e12,
    kinds.WIDE: 70.2e12,
    kinds.MASKED: 153e12,
    kinds.DELTA_RULE: 45.0e12,
    kinds.STATE_SPACE: 46.8e12,
}
H200 = Rates(
    flops=_FLOPS,
    memory=3.5e12,
    decoding=2.4e12,
    gap_s=1.74e-6,
    launch_s=43.7e-6,
    prepared_launch_s=361e-6,
    collective_launch_s=1.99e-3,
    pause_s=8.3e-3,
    host=29.4e9,
    collective=4.7,
    attention=3.48,
    source="fitted to measurements on NVIDIA H200",
)
H100 = replace(
    H200,
    memory=2.89e12,
    decoding=2.5e12,
    host=41.5e9,
    source="fitted to measurements on NVIDIA H100 80GB HBM3",
)
MEASURED = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}
PROBED_SPREAD = 1.15  # `Rates.host_spread` where a probe measured copies
# Results of `benchmark.probed_rates` on an H200 (driver 580, torch 2.11, November 2026). `python`
# is of a host whose steps were fitted; others are slower. `host` corresponds to 29.4 GB/s in a
# step: of 54.8 in the probe, copies of a step reached 47, and on an H100 41.5 of 53.2.
PROBED_H200 = {
    "matmul": 684e12,
    "matmul in 8 bits": 1178e12,
    "attention 2048": 221e12,
    "attention 8192": 295e12,
    "attention 32768": 328e12,
    "decoding": 3.02e12,
    "memory": 4.28e12,
    "graphs": 580e3,
    "python": 3860.0,
    "host": 29.4e9 / 0.82,
}


def rates_of(gpu: GpuModel, probe: Probe | None = None) -> Rates:
    """Return the rates of a GPU: an H200's, scaled by the same probe on both; without a probe, and
    without measurements, by data sheets."""
    if probe is not None:
        return _probed(gpu, probe)
    h200, sheet = MEASURED["NVIDIA H200"], BY_NAME["NVIDIA H200"]
    if gpu.name in MEASURED:
        return MEASURED[gpu.name]
    computing, moving = gpu.flops / sheet.flops, gpu.bandwidth / sheet.bandwidth
    flops = {kind: rate * computing for kind, rate in h200.flops.items()}
    flops[kinds.EQUAL] = _equal_lengths_flops(gpu, flops)
    return replace(
        h200,
        flops=flops,
        memory=h200.memory * moving,
        decoding=min(h200.decoding, h200.memory * moving),
        host=h200.host * gpu.host_bandwidth / sheet.host_bandwidth,
        source=f"scaled by data sheets to {gpu.name}, not measured there (`{COMMAND}` does)",
    )


def _equal_lengths_flops(gpu: GpuModel, flops: Mapping[str, float]) -> float:
    served = any(word in gpu.name for word in CUDNN_SERVES)
    return flops[kinds.EQUAL if served else kinds.ATTENTION]


def _probed(gpu: GpuModel, probe: Probe) -> Rates:
    """Return an H200's rates, scaled; the table's where the probe lacks or doubts them."""
    ratios, table = probe.ratios(PROBED_H200), rates_of(gpu)
    if attention := [ratios[name] for name in ATTENTIONS if name in ratios]:
        ratios["attention"] = median(attention)

    def scaled(name: str, field: str, power: int = 1) -> float:
        table_rate: float = getattr(H200 if name in ratios else table, field)
        return table_rate * ratios.get(name, 1.0) ** power

    flops = dict(table.flops)
    for kind in flops:
        name = next((x for x in ("8 bits", "attention") if x in kind), "matmul")
        name = "matmul in 8 bits" if name == "8 bits" else name
        if name in ratios:
            flops[kind] = H200.flops[kind] * ratios[name]
    flops[kinds.EQUAL] = _equal_lengths_flops(gpu, flops)
    return replace(
        table,
        flops=flops,
        memory=scaled("memory", "memory"),
        decoding=scaled("decoding", "decoding"),
        gap_s=scaled("graphs", "gap_s", -1),
        launch_s=scaled("python", "launch_s", -1),
        prepared_launch_s=scaled("python", "prepared_launch_s", -1),
        collective_launch_s=scaled("python", "collective_launch_s", -1),
        pause_s=scaled("python", "pause_s", -1),
        host=scaled("host", "host"),
        host_spread=PROBED_SPREAD if "host" in ratios else table.host_spread,
        source=probe.basis,
    )
