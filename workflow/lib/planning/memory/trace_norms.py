"""What the norms of a decoder layer ask of the allocator, operation by operation, forward and
backward.

Written from what runs: Transformers' norms, torch's own, and their kernels; compared with a record
of all tensors that they made. An operation borrows its input and makes its value; with the value it
returns its backward, which takes a gradient over and makes that of the input.
"""

from collections.abc import Callable

from workflow.lib.model.architecture.model_shape import DecoderLayer
from workflow.lib.planning.memory.allocation_tape import SavedTensors, Tape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import fuses_norms

Backward = Callable[[int], int]
WORK = "layer_workspace"


class NormTrace:
    """The norms of a kind of layer, as one process runs them."""

    def __init__(self, tape: Tape, layer: DecoderLayer, setup: Setup, *, tokens: int) -> None:
        """tokens: of the micro-batch."""
        self._tape, self._kind, self._setup = tape, layer, setup
        self._tokens, self._c = tokens, setup.compute_bytes
        self._sources: dict[int, int] = {}  # of norms' outputs that are not kept: their inputs

    def norm(self, x: int, saved: SavedTensors, *, width: int) -> tuple[int, Backward]:
        """An RMS norm over rows of `width`: torch's own, or Transformers', which computes in
        fp32.
        """
        if fuses_norms(self._kind, self._setup):
            return self._fused_norm(x, saved, width=width)
        return self.plain_norm(x, saved, width=width)

    def _fused_norm(self, x: int, saved: SavedTensors, *, width: int) -> tuple[int, Backward]:
        tape, size = self._tape, self._c * self._tokens * width
        y, scales = tape.new(size, WORK), tape.new(4 * self._tokens, WORK)
        self._sources[y] = x
        handles = [saved.pack(x), saved.pack(scales)]
        tape.free(scales)

        def backward(grad: int) -> int:
            tensors = [saved.unpack(handle) for handle in handles]
            grad_x = tape.new(size, WORK)
            tape.free(grad, *tensors)
            return grad_x

        return y, backward

    def plain_norm(self, x: int, saved: SavedTensors, *, width: int) -> tuple[int, Backward]:
        """Transformers' RMS norm: x and its square in fp32, and back.

        A norm that was seen to keep more is taken as one that keeps more copies of x.
        """
        tape, size = self._tape, self._c * self._tokens * width
        wide = 4 * self._tokens * width
        x32 = tape.new(wide, WORK)
        tape.moment(wide, WORK)
        scales = tape.new(4 * self._tokens, WORK)
        handles = [saved.pack(x32), saved.pack(scales)]
        for _ in range(4, self._kind.norm_bytes, 4):
            copy = tape.new(wide, WORK)
            handles.append(saved.pack(copy))
            tape.free(copy)
        normed = tape.new(wide, WORK)
        tape.free(x32)
        low = tape.new(size, WORK)
        y = tape.new(size, WORK)
        tape.free(low, normed, scales)
        return y, lambda grad: self._plain_norm_backward(grad, saved, handles, size=size, wide=wide)

    def _plain_norm_backward(
        self, grad: int, saved: SavedTensors, handles: list[int], *, size: int, wide: int
    ) -> int:
        tape = self._tape
        tensors = [saved.unpack(handle) for handle in handles]
        weighted = tape.new(size, WORK)
        tape.free(grad)
        grad32 = tape.new(wide, WORK)
        tape.free(weighted)
        product, direct = tape.new(wide, WORK), tape.new(wide, WORK)
        tape.free(product, grad32)
        spread, power, doubled, through = (tape.new(wide, WORK) for _ in range(4))
        tape.free(doubled, power, spread, *tensors)
        total = tape.new(wide, WORK)
        tape.free(direct, through)
        grad_x = tape.new(size, WORK)
        tape.free(total)
        return grad_x

    def total(self, one: int, other: int) -> int:
        """The sum of two tensors, which are freed."""
        total = self._tape.new(self._tape.sizes[one], WORK)
        self._tape.free(one, other)
        return total
