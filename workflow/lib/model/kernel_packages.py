"""Packages with kernels of recurrent layers, which Transformers takes where they are installed.

Tensors without values have no addresses to launch them by, so descriptions and recordings use the
family's torch code: where ours do not compute a recurrence, that keeps more, an upper bound."""

import sys

KERNEL_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")


def compute_by_torch_code() -> None:
    """Let this process find none of the packages: before Transformers loads a family's code."""
    for name in KERNEL_PACKAGES:
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]
