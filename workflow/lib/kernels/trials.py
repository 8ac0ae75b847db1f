"""Whether kernels are right on a GPU: compilers differ by GPU and version, and some make wrong
programs of kernels like ours.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
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


def are_right(
    made: Callable[[], Iterable[torch.Tensor]], expected: Iterable[torch.Tensor], *, of: str
) -> bool:
    """Return whether kernels can be built, and give what torch's operations give up to rounding; if
    not, say so in the log.
    """
    try:
        pairs = list(zip(made(), expected, strict=True))
    # Whatever it is: what a GPU lacks are errors of Triton's own classes.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        logger.warning("Kernels of %s cannot be built here (%s): steps take longer.", of, reason)
        return False
    right = all(bool((x - y).abs().max() < TRIED_ERROR * y.abs().max()) for x, y in pairs)
    if not right:
        logger.warning(
            "Kernels of %s compute something else on this GPU: they are not used, and steps take "
            "longer.",
            of,
        )
    return right
