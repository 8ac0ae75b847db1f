"""Seconds of a step from a recording of its work (`planning.work`): a roofline.

Each kind of operation has its rate (`rates`): matmuls in FLOP/s, or in bytes/s if they move many
bytes per FLOP; attention in both, so short documents take longer for a FLOP; all else in bytes/s.
Three things run beside the computation, and count only for their excess: Python, which launches
kernels outside of graphs; traffic between GPUs; copies to the host and back. On PCIe the last two
share the slot. Units: FLOP, bytes, seconds."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from workflow.lib.artifacts.preflight_record import Estimate
from workflow.lib.planning import work as kinds
from workflow.lib.planning.timing.rates import UNSURE, CpuRates, Rates
from workflow.lib.planning.work import BESIDE, NOTHING, UPDATE, Amount, Work
from workflow.lib.settings.optimizer_kinds import OPTIMIZERS
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.gpu_models import PCIE_4, PCIE_5, GpuModel

LOCAL_HOP_S = 2e-6  # a ring's hop within a node, and between nodes; assumed
REMOTE_HOP_S = 10e-6
NETWORK_PER_GPU = 50e9  # one 400 Gb/s port for each GPU; assumed where a run takes several nodes


@dataclass(frozen=True)
class Fabric:
    """Links of GPUs: bytes/s in one direction, of a GPU within a node and of a node outside."""

    name: str
    gpus_per_node: int
    local: float
    network: float
    attained: float = 0.8  # share of these figures that a large collective reaches; assumed


def fabric_of(gpu: GpuModel, *, gpus_per_node: int) -> Fabric:
    """Return the usual links of such GPUs: their own, or PCIe through the host."""
    network = NETWORK_PER_GPU * gpus_per_node
    return Fabric(gpu.link.name, gpus_per_node, gpu.link.bandwidth, network, gpu.link.share)


def ring_seconds(num_bytes: float, fabric: Fabric, *, processes: int, stride: int = 1) -> float:
    """Seconds to gather (or reduce and scatter) `num_bytes` over `processes` GPUs, `stride` apart:
    1 = neighbours, node after node; a group's size = one GPU of each group."""
    if processes == 1:
        return 0.0
    local = max(1, min(processes, fabric.gpus_per_node // stride))
    nodes = math.ceil(processes / local)
    # rings that share a node's network
    sharing = fabric.gpus_per_node // local if nodes > 1 else 1
    inside = num_bytes * (processes - 1) / processes / fabric.local if local > 1 else 0.0
    between = num_bytes * sharing * (nodes - 1) / nodes / fabric.network
    hops = (processes - nodes) * LOCAL_HOP_S + (nodes if nodes > 1 else 0) * REMOTE_HOP_S
    return max(inside, between) / fabric.attained + hops


Parts = dict[str, float]
_Sums = Mapping[tuple[str, bool], float]
BACKWARD = "backward"
PHASES = ("look_up_embedding", "forward", "loss", BACKWARD, UPDATE)
TRAFFIC, EXPOSED, LAUNCHED = "traffic", "exposed", "launched"
COMPUTING = ("matmuls", "attention", "dequantization", "elementwise", "loss", "update")
READS_OFTEN = {kinds.ATTENTION, kinds.EQUAL, kinds.BROAD, kinds.FLEX, kinds.WIDE, kinds.MASKED}
ATTENTION = READS_OFTEN | {kinds.SHORT}
PREPARED = {kinds.GROUPED, kinds.GROUPED_8, kinds.FLEX}  # see `Rates.prepared_launch_s`
COMPUTATION = "what the GPU computes"
# Of a matmul's FLOP or bytes, whichever takes less: the first loads and last stores of each block.
NOT_HIDDEN = 0.12
# Of `Rates.launch_s`: the optimizer's kernels are launched in a loop of C++.
UPDATE_LAUNCH = 0.5
# Bytes/s that all GPUs of a host together copy to its memory, or from it: 8 x H200, each with 6 of
# 8 layers' offloaded activations of 70B width, copied 19 GB/s each (November 2026, a virtual
# machine of 128 cores). A host's memory differs; others were not measured.
HOST_MEMORY_BANDWIDTH = 150e9


@dataclass(frozen=True)
class Clock:
    """Converts a plan's work to seconds, on one kind of GPU."""

    gpu: GpuModel
    fabric: Fabric
    rates: Rates

    def parts(
        self,
        work: Work,
        plan: StepPlan,
        *,
        num_layers: int,
        trained_share: float,
        micro_batches: int = 1,
    ) -> Parts:
        """Seconds of a micro-batch by work and waiting; their sum is the time.

        trained_share: tokens in the loss, 0 to 1; micro_batches: of a step."""
        sums = defaultdict[tuple[str, bool], float](float)  # by part, of backward or not
        launched, computed = (dict.fromkeys(PHASES, 0.0) for _ in range(2))
        by_python = dict.fromkeys(PHASES, 1.0)  # shares; passes of reference and estimate are none
        if plan.graphed:  # of graphs
            by_python = dict.fromkeys(PHASES, 1 - 1 / plan.forward_passes)
            by_python |= {BACKWARD: 0.0, UPDATE: 1.0}
        for phase, kind, amount in _scaled(work, trained_share, micro_batches, plan.forward_passes):
            for name, seconds in self._counted(plan, phase, kind, amount):
                sums[name, phase == BACKWARD] += seconds
                if name == LAUNCHED:
                    launched[phase] += by_python[phase] * seconds
                elif name in COMPUTING:
                    computed[phase] += seconds
        parts = {name: max(0.0, sums[name, False] + sums[name, True]) for name in COMPUTING}
        ahead = plan.graphed and OPTIMIZERS[plan.optimizer].device_decides
        if plan.graphed and not ahead:  # an update is launched after everything before it has ended
            computed = {UPDATE: computed[UPDATE]}
        python_s = _behind_python(launched, computed)
        late = (self._late(sums, plan, num_layers, backward=x) for x in (False, True))
        gpu_s, host_s = map(sum, zip(*late, strict=True))
        return parts | {
            "waiting_for_python": python_s,
            "waiting_for_other_gpus": sums[EXPOSED, False]
            + sums[EXPOSED, True]
            + max(0.0, gpu_s - max(0.0, python_s - host_s)),
            "waiting_for_the_host": max(0.0, host_s - python_s),
            "waiting_between_steps": 0.0 if ahead else self.rates.pause_s / micro_batches,
        }

    def spread(self, work: Work, plan: StepPlan, **counts: Any) -> "Spread":
        """Return the range of a micro-batch on other hosts; arguments as of `parts`."""

        def taken_s(power: int, part: str | None = None) -> float:
            clock = replace(self, rates=self.rates.varied(power, part))
            return sum(clock.parts(work, plan, **counts).values())

        share = self.rates.spread
        wide_s = {part: taken_s(1, part) - taken_s(-1, part) for part in UNSURE}
        wide_s[COMPUTATION] = taken_s(0) * (share - 1 / share)
        return Spread(taken_s(-1) / share, taken_s(1) * share, max(wide_s, key=wide_s.__getitem__))

    def _counted(
        self, plan: StepPlan, phase: str, kind: str, amount: Amount
    ) -> Iterator[tuple[str, float]]:
        """Yield the seconds of a kind of work, by part."""
        name, *group = kind.removesuffix(BESIDE).partition("@")[0].split("/")
        rates = self.rates
        launch_s = rates.prepared_launch_s if name in PREPARED else rates.launch_s
        launch_s *= UPDATE_LAUNCH if phase == UPDATE else 1.0
        if name in (kinds.GATHER, kinds.REDUCE):
            seconds = self._collective_s(amount, *map(int, group))
            beside = kind.endswith(BESIDE) and seconds != 0
            yield (TRAFFIC if beside else EXPOSED), seconds
            if beside:
                yield "elementwise", rates.collective * amount.bytes / rates.memory
                launch_s = rates.collective_launch_s
        elif name in (kinds.FROM_HOST, kinds.TO_HOST):
            yield name, amount.bytes / self._host_bandwidth(plan)
        else:
            yield _part(phase, name), self.seconds(name, amount)
        yield LAUNCHED, amount.calls * launch_s

    def seconds(self, name: str, amount: Amount) -> float:
        """Return the seconds of an amount of a kind: linear in amounts, which may be below 0 as
        parts of a sum."""
        rates, gaps_s = self.rates, amount.calls * self.rates.gap_s
        if name == kinds.DECODE:
            return amount.bytes / rates.decoding + gaps_s
        moving_s = amount.bytes / rates.memory
        if name not in rates.flops:
            return moving_s + gaps_s
        if name in ATTENTION:
            moving_s *= rates.attention if name in READS_OFTEN else 1.0
            return amount.flop / rates.flops[name] + moving_s + gaps_s
        hidden_s, longer_s = sorted((amount.flop / rates.flops[name], moving_s), key=abs)
        return longer_s + NOT_HIDDEN * hidden_s + gaps_s

    def _collective_s(self, amount: Amount, processes: int, stride: int) -> float:
        if processes == 1 or not amount.calls:
            return 0.0
        size = amount.bytes / amount.calls
        seconds = ring_seconds(size, self.fabric, processes=processes, stride=stride)
        return amount.calls * seconds

    def _host_bandwidth(self, plan: StepPlan) -> float:
        process_bandwidth = HOST_MEMORY_BANDWIDTH / min(plan.processes, self.fabric.gpus_per_node)
        return min(self.rates.host, process_bandwidth)

    def _late(
        self, sums: _Sums, plan: StepPlan, num_layers: int, *, backward: bool
    ) -> tuple[float, float]:
        """Return by how much a pass's traffic and copies exceed its compute."""
        computing_s = sum(sums[name, backward] for name in COMPUTING)
        out_s, back_s = (sums[name, backward] for name in (kinds.TO_HOST, kinds.FROM_HOST))
        traffic_s = sums[TRAFFIC, backward]
        if self.gpu.link in (PCIE_4, PCIE_5) and traffic_s:  # one slot for all of it
            traffic_s += out_s + back_s
        late_s = max(0.0, out_s - computing_s, back_s - computing_s)
        if layers := plan.offload_layers:  # each is copied while the one before it computes
            each_s = (back_s + traffic_s * layers / num_layers) / layers
            late_s = max(late_s, layers * max(0.0, each_s - computing_s / num_layers))
        return max(0.0, traffic_s - computing_s - late_s), late_s


def _behind_python(launched: Mapping[str, float], computed: Mapping[str, float]) -> float:
    """Return the GPU's delay by Python, which launches phase after phase without waiting; the GPU
    cannot end a phase before it is launched."""
    behind_s = (launched[phase] - computed.get(phase, 0.0) for phase in PHASES)
    return max(accumulate(behind_s, initial=0.0))


def _part(phase: str, name: str) -> str:
    """Return the part of a kind of work, for people."""
    if name == kinds.DECODE:
        return "dequantization"
    if name in ATTENTION:
        return "attention"
    if name not in (kinds.MEMORY, kinds.DELTA_RULE, kinds.STATE_SPACE):
        return "matmuls"
    return {"loss": "loss", UPDATE: "update"}.get(phase, "elementwise")


def _scaled(
    work: Work, trained_share: float, micro_batches: int, forward_passes: int
) -> Iterator[tuple[str, str, Amount]]:
    """Yield phases and kinds with their amounts for a micro-batch."""
    factors = dict.fromkeys(PHASES, float(forward_passes)) | {BACKWARD: 1.0}
    factors |= {"loss": trained_share * forward_passes, UPDATE: 1 / micro_batches}
    for phase, amounts in work.phases.items():
        for kind, amount in amounts.items():
            yield phase, kind, NOTHING.plus(amount, factors.get(phase, 1.0))


def cpu_seconds(
    work: Work, rates: CpuRates, *, micro_batches: int = 1, forward_passes: int = 1
) -> float:
    """Seconds of a micro-batch in one CPU process."""
    total = NOTHING
    for _, _, amount in _scaled(work, 1.0, micro_batches, forward_passes):
        total = total.plus(amount)
    return total.flop / rates.flops + total.bytes / rates.memory + total.calls * rates.call_s


@dataclass(frozen=True)
class Spread:
    """Least and most seconds of a micro-batch, and the largest cause of the range, in words."""

    least_s: float
    most_s: float
    due_to: str


def estimate(
    parts: Parts | None,
    *,
    basis: str,
    num_gpus: int,
    tokens: int,
    accumulation_steps: int,
    num_steps: int,
    price_per_gpu_hour: float | None,
    spread: Spread | None = None,
) -> Estimate:
    """Return the predicted time of a run. parts: of a micro-batch of `tokens` tokens, None if the
    speed is unknown; num_gpus: 0 on the CPU. `cost` is None without a price or a time."""
    if parts is None:
        return Estimate(
            step_s=None,
            total_h=None,
            tokens_per_s_per_process=None,
            cost=None,
            parts_s={},
            basis=basis,
        )
    micro_s = sum(parts.values())
    step_s = micro_s * accumulation_steps
    total_h = step_s * num_steps / 3600
    gpu_hours = total_h * num_gpus
    ranges: dict[str, Any] = {}
    if spread is not None:
        ends_s = (spread.least_s * accumulation_steps, spread.most_s * accumulation_steps)
        ranges = {"step_range_s": ends_s, "range_due_to": spread.due_to}
    return Estimate(
        step_s=step_s,
        total_h=total_h,
        tokens_per_s_per_process=tokens / micro_s,
        cost=gpu_hours * price_per_gpu_hour if gpu_hours and price_per_gpu_hour else None,
        parts_s=parts,
        basis=basis,
        **ranges,
    )
