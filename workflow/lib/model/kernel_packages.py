"""Packages with kernels of recurrent layers, which Transformers uses where they are installed.

Meta tensors have no addresses for kernels, so descriptions and recordings use the family's torch
code: where the project's kernels do not compute a recurrence, that keeps more memory, an upper
bound."""

import sys

KERNEL_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")


def compute_by_torch_code() -> None:
    """Hide the packages from this process; call it before Transformers loads a family's code."""
    for name in KERNEL_PACKAGES:
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]
