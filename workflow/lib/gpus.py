"""GPUs that predictions know without having one: speed by data sheet, memory as CUDA reports it.

Speeds: NVIDIA's architecture white papers (GA102, AD102, RTX Blackwell, A100, H100) and data sheets (A5000,
A6000, L40S, RTX 6000 Ada, H200, HGX B200), AMD's data sheet of the MI300X; sparse figures halved. Memory:
`total_memory` of CUDA, as PyTorch's out-of-memory messages show it; it is below the figure on the box, and
error correction takes more where it is switched on.
"""

import difflib
import re
from dataclasses import dataclass

from workflow.lib.errors import setting_error

GIB = 2**30
COUNT = re.compile(r"^(?:(\d+)\s*x\s*)?(.+)$", re.IGNORECASE)
MOST_GPUS = 4096


@dataclass(frozen=True)
class GpuModel:
    """One kind of GPU.

    flops: dense bf16 FLOP/s with fp32 accumulation; bandwidth: memory bytes/s; memory_gib: GiB that a
    process sees; aliases: what people call it.
    """

    name: str
    """As the driver reports it."""
    memory_gib: float
    flops: float
    bandwidth: float
    aliases: tuple[str, ...]


MODELS = (
    GpuModel("NVIDIA GeForce RTX 3090", 23.69, 71e12, 936e9, ("3090", "RTX 3090")),
    GpuModel("NVIDIA GeForce RTX 4090", 23.64, 165.2e12, 1008e9, ("4090", "RTX 4090")),
    GpuModel("NVIDIA GeForce RTX 5090", 31.36, 209.5e12, 1792e9, ("5090", "RTX 5090")),
    GpuModel("NVIDIA RTX A5000", 23.68, 111.1e12, 768e9, ("A5000", "RTX A5000")),
    GpuModel("NVIDIA RTX A6000", 47.54, 154.8e12, 768e9, ("A6000", "RTX A6000")),
    GpuModel(
        "NVIDIA RTX 6000 Ada Generation", 47.50, 364.2e12, 960e9,
        ("6000 Ada", "RTX 6000 Ada", "A6000 Ada", "RTX A6000 Ada"),
    ),
    GpuModel("NVIDIA L40S", 44.40, 362e12, 864e9, ("L40S",)),
    GpuModel("NVIDIA A100-PCIE-40GB", 39.39, 312e12, 1555e9, ("A100 PCIe 40GB",)),
    GpuModel("NVIDIA A100-SXM4-40GB", 39.39, 312e12, 1555e9, ("A100 40GB", "A100-40")),
    GpuModel("NVIDIA A100 80GB PCIe", 79.15, 312e12, 1935e9, ("A100 PCIe",)),
    GpuModel("NVIDIA A100-SXM4-80GB", 79.15, 312e12, 2039e9, ("A100", "A100 80GB", "A100-80")),
    GpuModel("NVIDIA H100 PCIe", 79.10, 756e12, 2039e9, ("H100 PCIe",)),
    GpuModel("NVIDIA H100 80GB HBM3", 79.10, 989e12, 3352e9, ("H100", "H100 80GB", "H100 SXM")),
    GpuModel("NVIDIA H200", 139.81, 989e12, 4800e9, ("H200",)),
    GpuModel("NVIDIA B200", 178.35, 2250e12, 8000e9, ("B200",)),
    GpuModel("AMD Instinct MI300X", 191.98, 1307.4e12, 5300e9, ("MI300X",)),
)  # fmt: skip
BY_NAME = {model.name: model for model in MODELS}


def parse_gpus(text: str, *, setting: str) -> tuple[int, GpuModel]:
    """Return how many GPUs of which kind `2x4090`, `8 x H100` or `A100` mean.

    Raises `UserError`, in the name of `setting`, if the count is 0 or absurd or the kind is not known; the nearest
    kinds are listed.
    """
    match = COUNT.match(text.strip())
    assert match is not None or not text.strip(), "the pattern takes any text"
    count, kind = (match.group(1) or "1", match.group(2)) if match else ("1", "")
    if not 1 <= int(count) <= MOST_GPUS:
        bound = f"the number of GPUs must be 1 to {MOST_GPUS}"
        raise setting_error(setting, text, bound, "Write it like 2x4090")
    known = {_plain(alias): model for model in MODELS for alias in (model.name, *model.aliases)}
    if _plain(kind) in known:
        return int(count), known[_plain(kind)]
    near = difflib.get_close_matches(_plain(kind), known, n=3, cutoff=0.3)
    names = list(dict.fromkeys(known[key].aliases[0] for key in near))
    names = names or [model.aliases[0] for model in MODELS]
    bound = f"no GPU of the name {kind!r} is known"
    raise setting_error(setting, text, bound, f"Did you mean {', '.join(names)}?".rstrip("."))


def _plain(name: str) -> str:
    """A name without what people write in several ways."""
    return re.sub(r"[\s_-]|nvidia|geforce|amd|instinct|generation", "", name.lower())
