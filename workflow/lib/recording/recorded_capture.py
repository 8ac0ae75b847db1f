"""The capture of a CUDA graph on the recorded GPU, which allocates in a pool of its own."""

from collections.abc import Callable

import torch

from workflow.lib.recording.layer_tape import LayerTape
from workflow.lib.recording.recorded_gpu import RecordedStream, recorded_gpu


class RecordedCapture:
    """Stands for `micro_batch_graphs.CudaCapture`: `torch.cuda.graph` gives free pages back and
    captures in a pool of its own, here that of another stream."""

    def __init__(self, tape: LayerTape) -> None:
        self._tape, self._stream = tape, RecordedStream()

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run `function`, whose allocations are noted; what is returned allocates nothing."""
        self._tape.empty_cache()
        with recorded_gpu().stream(self._stream):
            result = function()
        return lambda: result
