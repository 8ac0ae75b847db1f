"""The capture of a function's launches into a CUDA graph."""

from collections.abc import Callable

import torch

Replay = Callable[[], torch.Tensor]
Capture = Callable[[Callable[[], torch.Tensor]], Replay]


class CudaCapture:
    """Captures functions into CUDA graphs that share their memory: only one runs at a time. torch
    ends a capture in several steps, and skips all steps after one that fails
    (`CUDAGraph::capture_end`, torch 2.11 to 2.13). Its allocator then stays in capture mode, where
    it frees no page to make room. In torch 2.11 so does the device's random number generator, which
    then cannot draw. `_end` runs the skipped steps."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], torch.Tensor]) -> Replay:
        """Capture the launches of `function`; return the replay, which launches them again and
        returns the same tensor, with new values. Raises `RuntimeError` if it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        current_stream = torch.cuda.stream(torch.cuda.current_stream())
        try:
            # Other threads copy rows and checkpoints meanwhile, outside of the capture.
            with (
                current_stream,
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
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
        """Run the steps that torch skips after a failed end of a capture."""
        device = torch.cuda.current_device()
        numbers = torch.cuda.default_generators[device]
        numbers.graphsafe_set_state(numbers.clone_state())  # the same seed, outside of a capture
        torch._C._cuda_endAllocateToPool(device, self._pool)
        torch._C._cuda_releasePool(device, self._pool)


def has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether torch has ended a graph's capture. Only then the graph gives its pool."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def first_cause(error: RuntimeError) -> RuntimeError:
    """Return the first error: the end of a capture fails after an earlier error."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error
