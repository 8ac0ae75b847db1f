"""GPUs known for predictions: speed by data sheet, memory as CUDA reports it.

Speeds: NVIDIA's architecture white papers (GA102, AD102, RTX Blackwell, A100, H100) and data sheets
(A5000, A6000, L40S, RTX 6000 Ada, H200, HGX B200), AMD's data sheet of the MI300X; sparse figures
halved. Links: the same sheets, one direction (NVLink's figures count both), without optional
bridges. Memory: `total_memory` of CUDA, as in PyTorch's out-of-memory messages; it is below the
nominal figure, and error correction reduces it further."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from workflow.lib.system.errors import setting_error
from workflow.lib.system.near_names import near_names

# The count is before or after the kind: 2x4090, 2*4090, 4090x2, RTX4090:2 as in Slurm.
COUNT_BEFORE = re.compile(r"(?P<count>[0-9]{1,9})\s*[x*]\s*(?P<kind>.+)", re.IGNORECASE)
COUNT_BEHIND = re.compile(r"(?P<kind>.+?)\s*[x*:]\s*(?P<count>[0-9]{1,9})", re.IGNORECASE)
FORM = "Write the number and the kind like 2x4090"
NUMBER = r"([0-9]+(?:[.][0-9]+)?)"
# Any other kind: its name, and its figures as `MODELS` has them. The link is PCIe 4.0.
OTHER_KIND = re.compile(
    rf"(?![0-9]+\s*[x*])([^()]+?)\s*\({NUMBER} ?GiB, ?{NUMBER} ?TFLOP/s, ?{NUMBER} ?GB/s\)"
)
OTHER_EXAMPLE = "NVIDIA GeForce RTX 4080 (15.7 GiB, 97.5 TFLOP/s, 717 GB/s)"
MOST_GPUS = 4096
AMPERE = ("RTX 3090", "RTX A5000", "RTX A6000", "A100")  # compute capability 8.0 and 8.6


@dataclass(frozen=True)
class Link:
    """Link between GPUs of one machine: bandwidth (bytes/s, one way), collectives' share."""

    name: str
    bandwidth: float
    share: float


# Shares are assumed, except NVLink's, measured on our 2 x H200. PCIe: without direct access between
# cards, as on GeForce, a collective's bytes go through host memory.
PCIE_4, PCIE_5 = Link("PCIe 4.0", 32e9, 0.4), Link("PCIe 5.0", 64e9, 0.4)
NVLINK_3, NVLINK_4, NVLINK_5 = (
    Link(f"NVLink {generation}", bandwidth, 0.8)
    for generation, bandwidth in ((3, 300e9), (4, 450e9), (5, 900e9))
)
INFINITY = Link("Infinity Fabric", 64e9, 0.8)  # one link between two GPUs; eight have seven each


@dataclass(frozen=True)
class GpuModel:
    """One kind of GPU. flops: dense bf16 FLOP/s (fp32 accumulation); bandwidth: bytes/s;
    memory_gib: seen by a process; link: to its neighbours; aliases: other names."""

    name: str  # the driver's name
    memory_gib: float
    flops: float
    bandwidth: float
    link: Link
    host_bandwidth: float  # Bytes/s of its PCIe slot in one direction, by data sheet
    aliases: tuple[str, ...]

    @property
    def host_gib(self) -> float:
        """Usual GiB of host memory for each GPU: 64 with GeForce cards, 128 in workstations, 256 in
        servers (NVIDIA's DGX of eight have 2 TB)."""
        if "GeForce" in self.name:
            return 64.0
        return 256.0 if self.memory_gib > 64 else 128.0

    @property
    def float8(self) -> bool:
        """Whether it multiplies float8: NVIDIA's since compute capability 8.9."""
        return self.name.startswith("NVIDIA") and not any(word in self.name for word in AMPERE)


def _model(
    name: str, gib: float, tflops: float, gb_per_s: float, link: Link, *aliases: str
) -> GpuModel:
    """Return a GPU with its slot: PCIe 5.0 if its own links are newer than Ampere's."""
    host = PCIE_4 if link in (PCIE_4, NVLINK_3) else PCIE_5
    return GpuModel(name, gib, tflops * 1e12, gb_per_s * 1e9, link, host.bandwidth, aliases)


MODELS = (
    _model("NVIDIA GeForce RTX 3090", 23.69, 71, 936, PCIE_4, "3090", "RTX 3090"),
    _model("NVIDIA GeForce RTX 4090", 23.64, 165.2, 1008, PCIE_4, "4090", "RTX 4090"),
    _model("NVIDIA GeForce RTX 5090", 31.36, 209.5, 1792, PCIE_5, "5090", "RTX 5090"),
    _model("NVIDIA RTX A5000", 23.68, 111.1, 768, PCIE_4, "A5000", "RTX A5000"),
    _model("NVIDIA RTX A6000", 47.54, 154.8, 768, PCIE_4, "A6000", "RTX A6000"),
    _model(
        "NVIDIA RTX 6000 Ada Generation", 47.50, 364.2, 960, PCIE_4,
        "6000 Ada", "RTX 6000 Ada", "A6000 Ada", "RTX A6000 Ada",
    ),
    _model("NVIDIA L40S", 44.40, 362, 864, PCIE_4, "L40S"),
    _model("NVIDIA A100-PCIE-40GB", 39.39, 312, 1555, PCIE_4, "A100 PCIe 40GB"),
    _model("NVIDIA A100-SXM4-40GB", 39.39, 312, 1555, NVLINK_3, "A100 40GB", "A100-40"),
    _model("NVIDIA A100 80GB PCIe", 79.15, 312, 1935, PCIE_4, "A100 PCIe"),
    _model("NVIDIA A100-SXM4-80GB", 79.15, 312, 2039, NVLINK_3, "A100", "A100 80GB", "A100-80"),
    _model("NVIDIA H100 PCIe", 79.10, 756, 2039, PCIE_5, "H100 PCIe"),
    _model("NVIDIA H100 80GB HBM3", 79.10, 989, 3352, NVLINK_4, "H100", "H100 80GB", "H100 SXM"),
    _model("NVIDIA H200", 139.81, 989, 4800, NVLINK_4, "H200"),
    _model("NVIDIA B200", 178.35, 2250, 8000, NVLINK_5, "B200"),
    _model("AMD Instinct MI300X", 191.98, 1307.4, 5300, INFINITY, "MI300X"),
)  # fmt: skip
BY_NAME = {model.name: model for model in MODELS}


def parse_gpus(text: str, *, setting: str) -> tuple[int, GpuModel]:
    """Return number and kind of GPUs in `2x4090`, `8 x H100`, `4090:2` or `A100`. Raises
    `UserError`, naming `setting`, for an absurd count, an unknown kind or an ambiguous text."""
    readings = list(dict.fromkeys(_readings(text.strip())))
    right = [(count, model) for count, kind in readings if (model := model_named(kind))]
    if len(right) > 1:
        raise setting_error(setting, text, "either number can be the kind", FORM)
    if not right:
        *counted, (_, plain) = readings
        kinds = [kind for count, kind in counted if 1 <= count <= MOST_GPUS] or [plain]
        raise setting_error(setting, text, *_unknown_kind(max(kinds, key=len)))
    ((count, model),) = right
    if not 1 <= count <= MOST_GPUS:
        raise setting_error(setting, text, f"the number of GPUs must be 1 to {MOST_GPUS}", FORM)
    return count, model


def parse_gpu(text: str, *, setting: str) -> GpuModel:
    """Return the kind of GPU of a setting; raises `UserError` as `parse_gpus`."""
    if model := model_named(text):
        return model
    _, model = parse_gpus(text, setting=setting)
    raise setting_error(
        setting,
        text,
        "it is the kind of GPU alone",
        f"Set it to {model.aliases[0]}, and hardware.gpus to the number of a node",
    )


def model_named(name: str) -> GpuModel | None:
    """Return the GPU of a driver's name, an alias, or a name with figures; None if unknown."""
    if model := _models_by_plain_name().get(_plain(name)):
        return model
    if (match := OTHER_KIND.fullmatch(name)) is None:
        return None
    gib, tflops, gb_per_s = map(float, match.groups()[1:])
    return _model(name, gib, tflops, gb_per_s, PCIE_4, match[1])


def _readings(text: str) -> Iterator[tuple[int, str]]:
    """Yield possible readings of a text, the usual form first: number, and kind."""
    for pattern in (COUNT_BEFORE, COUNT_BEHIND):
        if match := pattern.fullmatch(text):
            yield int(match["count"]), match["kind"]
    yield 1, text


def _models_by_plain_name() -> dict[str, GpuModel]:
    return {_plain(alias): model for model in MODELS for alias in (model.name, *model.aliases)}


def _unknown_kind(kind: str) -> tuple[str, str]:
    models = _models_by_plain_name()
    near = near_names(_plain(kind), models, count=3)
    names = ", ".join(dict.fromkeys(models[key].aliases[0] for key in near))
    all_names = ", ".join(model.aliases[0] for model in MODELS)
    kinds = f"Did you mean {names}?" if near else f"Known are {all_names}."
    return f"no GPU of the name {kind!r} is known", (
        f"{FORM}. {kinds} Another kind has its figures behind its name: {OTHER_EXAMPLE}"
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce|amd|instinct|generation", "", name.lower())
