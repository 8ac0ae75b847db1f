"""NVIDIA's driver of a host with eight idle cards, for programs started with this folder in
PYTHONPATH."""
# ruff: noqa: E731, N816 - names of the real module

from types import SimpleNamespace


class NVMLError(Exception):
    """Never raised."""


nvmlMemory_v2 = 2
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 8
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
nvmlDeviceGetName = lambda handle: "NVIDIA A100-SXM4-40GB"
nvmlDeviceGetMemoryInfo = lambda handle, version: SimpleNamespace(
    total=40 * 2**30, reserved=0, used=0
)
nvmlDeviceGetTotalEnergyConsumption = lambda handle: 1000 * (handle + 1)  # millijoules
nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
nvmlDeviceGetMaxMigDeviceCount = lambda handle: 0
