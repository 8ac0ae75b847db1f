"""Whether kernels are right on a GPU: compilers differ by GPU and version, and some make wrong
programs of kernels like ours.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

logger = logging.getLogger("workflow")

TRIED_ERROR = 0.03  # of the largest value; bf16 is off by up to 0.008


@contextmanager
def gradients_alone() -> Iterator[None]:
    """Within the forward of a model: gradients that its hooks of saved tensors do not see, which
    count them, round them or move them.
    """
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


def are_right(made: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], *, of: str) -> bool:
    """Return whether values of kernels are those of torch's operations up to rounding; if not, say
    so in the log.
    """
    pairs = zip(made, expected, strict=True)
    right = all(bool((x - y).abs().max() < TRIED_ERROR * y.abs().max()) for x, y in pairs)
    if not right:
        logger.warning(
            "Kernels of %s compute something else on this GPU: they are not used, and steps take "
            "longer.",
            of,
        )
    return right
