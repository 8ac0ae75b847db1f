"""Probes: a machine's measured rates in the operations of a step, as files."""

import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pynvml
from pydantic import PositiveFloat

from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Provenance, Record
from workflow.lib.system.hardware import threads_of_job

FOLDER = Path("results") / "probe"
COMMAND = "python -m workflow.scripts.probe"
REPEATABLE = 0.1  # spread up to which a measurement counts
ATTENTIONS = {
    "attention 2048": (2, 2048),
    "attention 8192": (1, 8192),
    "attention 32768": (1, 32768),
}
"""Documents and their length, tokens."""


class Measured(Record, extra="forbid"):
    """A rate: FLOP/s, bytes/s or calls/s."""

    value: PositiveFloat  # median of several
    spread: float  # of the medians of its three thirds, as a share of `value`


class Probe(Record, extra="forbid"):
    """Rates of one kind of GPU, or of a CPU and the threads of a process."""

    advice = "Delete the file, or probe again."

    device: str  # the driver's name, or `cpu_name`
    driver: str
    measured: Mapping[str, Measured]
    """By operation, as `benchmark.probed_rates` names them."""
    provenance: Provenance

    @property
    def file_name(self) -> str:
        """The file's name, of all that the rates depend on."""
        words = (self.device, self.driver, "torch", self.provenance.packages["torch"])
        return re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(words)) + ".json"

    @property
    def rates(self) -> dict[str, float]:
        """The repeatable rates."""
        every = self.measured.items()
        return {name: rate.value for name, rate in every if rate.spread <= REPEATABLE}

    def ratios(self, reference: Mapping[str, float]) -> dict[str, float]:
        """Return each repeatable rate as a multiple of the reference's."""
        rates = self.rates
        return {name: rates[name] / reference[name] for name in rates.keys() & reference.keys()}

    @property
    def basis(self) -> str:
        """The probe's origin, as shown in a forecast."""
        made, torch = self.provenance.created_utc[:10], self.provenance.packages["torch"]
        vague = sorted(self.measured.keys() - self.rates.keys())
        but = f", but for {', '.join(vague)}, which varied too much" if vague else ""
        return f"from a probe of {self.device} of {made} (driver {self.driver}, torch {torch}){but}"


def read_probes(folder: Path = FOLDER) -> dict[str, Probe]:
    """Return the last probe of each device. Raises `UserError` for another file."""
    probes = (read_record(file, Probe) for file in folder.glob("*.json"))
    return {x.device: x for x in sorted(probes, key=lambda probe: probe.provenance.created_utc)}


def driver_version() -> str:
    """Return the driver version of this machine's GPUs."""
    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


def cpu_name(processes: int) -> str:
    """Return this machine's processor as Linux names it, and the threads of each process."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        name = dict(re.findall(r"^(model name)\s*:\s*(.+)$", text, re.M)).get("model name", name)
    return f"{name}, {max(1, threads_of_job() // processes)} threads a process"
