"""Packages with kernels of recurrent layers, which Transformers takes where they are installed.

They launch their kernels by the addresses of tensors, and tensors without values have none. So what
only looks at a model, or records what it allocates, has it compute by the family's torch code. Of a
recurrence that is not computed by operations of ours (`recurrence_functions`) this keeps more for
backward: with such a package the prediction is an upper bound."""

import sys

KERNEL_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")


def compute_by_torch_code() -> None:
    """Let this process find none of the packages: before Transformers loads a family's code."""
    for name in KERNEL_PACKAGES:
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]
