"""CUDA graphs of functions, and what is left to do where one cannot be captured.

torch ends a capture in several steps, and leaves out all that follow one that fails
(`CUDAGraph::capture_end`, torch 2.11 to 2.13). Its allocator then goes on as during a capture,
where it frees no page to make room. In torch 2.11 the device's random numbers do so too, and cannot
be drawn. What was left out is done here.
"""

from collections.abc import Callable

import torch

Replay = Callable[[], torch.Tensor]
Capture = Callable[[Callable[[], torch.Tensor]], Replay]


class CudaCapture:
    """Captures functions into CUDA graphs that share their memory: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], torch.Tensor]) -> Replay:
        """Capture what `function` launches; return what launches it again and returns the same
        tensor, with new values. Raises `RuntimeError` for what cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.stream(torch.cuda.current_stream())
        try:
            # Other threads copy rows and checkpoints meanwhile, which is none of its business.
            with here, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = function()
        except RuntimeError:
            if not has_ended(graph):
                self._end()
            raise

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def _end(self) -> None:
        """Do what torch leaves out after a capture whose end has failed."""
        device = torch.cuda.current_device()
        numbers = torch.cuda.default_generators[device]
        numbers.graphsafe_set_state(numbers.clone_state())  # the same seed, and not in a capture
        torch._C._cuda_endAllocateToPool(device, self._pool)
        torch._C._cuda_releasePool(device, self._pool)


def has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether torch has ended a graph's capture. It tells the pool of those alone."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def first_cause(error: RuntimeError) -> RuntimeError:
    """Return what went wrong first: the end of a capture fails because of an earlier error, and
    tells nothing of it.
    """
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error
