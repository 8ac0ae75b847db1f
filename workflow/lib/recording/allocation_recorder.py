"""Allocation, resize and release of every storage on the recorded GPU, as events of a tape.

Temporary memory of libraries' kernels is read from torch 2.11 to 2.13 and compared with measured
peaks (`tests/gpu/measurements`). A dispatch mode sees operations, and the end of a storage its
release. FSDP2 resizes its gather buffers without an operation: these storages (known by `out=`) are
checked before each operation, of a layer's the first and the last, and before a view only those
that have memory."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from workflow.lib.kernels.kernel_launch import LAUNCHED
from workflow.lib.planning.memory.allocation_tape import COMPUTE, HOST
from workflow.lib.planning.work import BESIDE
from workflow.lib.recording.known_results import VIEWS, tensors
from workflow.lib.recording.layer_tape import NONE, LayerTape
from workflow.lib.recording.operation_work import work_of
from workflow.lib.recording.recorded_gpu import COMPUTING, RecordedGpu
from workflow.lib.recording.term_names import UNNAMED, made_by
from workflow.lib.system.device_types import RECORDED

aten = torch.ops.aten
MATMULS = frozenset({aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm})
# cuBLAS on Hopper (aten/src/ATen/cuda/CUDABlas.cpp, parseChosenWorkspaceSize)
WORKSPACE_BYTES = 2**25
DOCUMENT_PADDING = 128  # tokens, of FlashAttention's sums in backward


def workspaces(func: Any, args: Any, result: Any) -> Sequence[int]:
    """Return the bytes of an operation's temporary tensors, all allocated at once."""
    find = WORKSPACES.get(_name(func))
    return () if find is None else find(args, result)


_name = cache(str)


def _flash_backward(args: Any, _: Any) -> list[int]:
    """FlashAttention 2, query (tokens, heads, head_dim): sums of rows and the queries' gradient in
    fp32, both padded per document; gradients of keys and values for every query head. Source:
    `mha_varlen_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp."""
    query, key, starts = args[1], args[2], args[6]
    padded = len(query) + DOCUMENT_PADDING * (starts.shape[0] - 1)
    return _flash_gradients(query, heads=query.shape[1], key_heads=key.shape[1], padded=padded)


def _rows_flash_backward(args: Any, _: Any) -> list[int]:
    """The same of rows of one length, query (rows, heads, seq_len, head_dim): `mha_bwd` there."""
    query, key = args[1], args[2]
    rows, heads, seq_len, _ = query.shape
    padded = rows * -(-seq_len // DOCUMENT_PADDING) * DOCUMENT_PADDING
    return _flash_gradients(query, heads=heads, key_heads=key.shape[1], padded=padded)


def _flash_gradients(query: torch.Tensor, *, heads: int, key_heads: int, padded: int) -> list[int]:
    width = -(-query.shape[-1] // 32) * 32
    grouped = [query.nbytes, query.nbytes] if key_heads != heads else []
    return [4 * padded * heads, 4 * padded * heads * width, *grouped]


def _efficient_backward(args: Any, _: Any) -> list[int]:
    """Memory-efficient attention, query (rows, heads, seq_len, head_dim): sums, fp32 gradient."""
    query = args[1]
    return [4 * query.shape[:-1].numel(), 4 * query.numel()]


WORKSPACES: dict[str, Callable[[Any, Any], Sequence[int]]] = {
    "aten.logsumexp.default": lambda args, _: [args[0].nbytes],  # exp(x - max), beside its sums
    # the product of gradient and output, which is summed
    "aten._softmax_backward_data.default": lambda _, result: [result.nbytes],
    "torch_attn._varlen_attn_backward.default": _flash_backward,
    "aten._scaled_dot_product_flash_attention_backward.default": _rows_flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
}


READ = torch.ops.aten._local_scalar_dense.default
DEVICE = torch.ops.prim.device.default  # called more often than all others together
REDUCE = torch.ops.c10d.allreduce_.default
# DTensor makes stand-ins of its operands by this operation, to learn a result's shape; the engine
# and its libraries use it for nothing else.
STAND_IN = torch.ops.aten.empty_strided.default
COPY = torch.ops.aten.copy_.default
FAKE = torch._C._TorchDispatchModeKey.FAKE
NO_TASK = -1  # autograd's, outside of backward


class _Storage:
    """A storage on the device, by weak reference, and the tape's tensor for its memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.reference = weakref.ref(storage)
        self.num_bytes = 0
        self.tensor = -1


class AllocationRecorder(TorchDispatchMode):
    """Writes allocations and releases in the block to `tape`, within the GPU's mode."""

    def __init__(self, gpu: RecordedGpu, tape: LayerTape, *, alone: bool = False) -> None:
        """alone: FSDP2 gathers from one process alone, by copies in place of collectives."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self._copies = COPY if alone else None
        self._gpu = gpu
        self._storages: dict[int, _Storage] = {}
        self._gathered: dict[int, list[_Storage]] = {}
        """FSDP2's gather buffers, by their first storage: written by `out=` or copied to."""
        self._allocated: dict[int, list[_Storage]] = {}
        """Those with memory."""
        self._stand_ins: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._multiplying: set[tuple[int, bool]] = set()
        self._streams: dict[int, str] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled, so nothing has to keep torch from compiling `__torch_dispatch__`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].fake_device
        options = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a tensor subclass, which calls operations on its local tensors
        if torch._C._get_dispatch_mode(FAKE) is not self._gpu.mode:  # it tries shapes alone
            return func(*args, **options)
        if func is READ and args[0].constant is None:
            return float(args[0].is_floating_point())  # for the host: a healthy loss, counts of 0
        is_view = func in VIEWS
        self._note_resized(self._allocated if is_view else self._gathered)
        if options:
            self._follow(options.get("out"))
        if func is self._copies:
            self._follow(args[0])
        if func is LAUNCHED:
            self._count(func, args, options, None)
            return None
        call = _reduced if func is REDUCE else self._gpu.results.call
        result = call(func, args, options)
        if func is STAND_IN or (self._stand_ins and self._has_stand_in(args, options)):
            self._stand_ins.update(x.untyped_storage() for x in tensors(result))
            return result
        if is_view and not self.tape.follows_tensors:
            return result
        self._count(func, args, options, result)
        if options.get("pin_memory"):
            self._note_pinned(result.untyped_storage())
        made = [*tensors(result)]
        for tensor, layer in zip(made, self._layers(args, len(made)), strict=True):
            self.tape.layer = layer
            self._note(tensor)
        self._note_workspaces(func, args, result)
        return result

    def _count(self, func: Any, args: Any, options: Any, result: Any) -> None:
        """Count an operation's work; each layer has its share of one on tensors of many layers."""
        if (
            not self.tape.counts
            or (kind_and_amount := work_of(func, args, options, result)) is None
        ):
            return
        kind, amount = kind_and_amount
        if not self._gpu.current_stream().computes:
            kind += BESIDE
        first = args[0] if args else None
        if not (isinstance(first, list) and len(first) > 1 and self.tape.follows_tensors):
            self.tape.count(kind, amount)
            return
        layers = Counter(self._layer(tensor) for tensor in first)
        for layer, count in layers.items():
            self.tape.count(kind, amount, layer, count / len(first))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None and any(map(_differs, self._storages.values())):
            raise RuntimeError("memory was resized into which nothing had been gathered")

    def _has_stand_in(self, *operands: Any) -> bool:
        return any(x.untyped_storage() in self._stand_ins for x in tensors(operands))

    def _note(self, tensor: torch.Tensor) -> None:
        """Note a tensor's storage, if it is on the device and new."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages and tensor.device.type == RECORDED:
            entry = self._storages[storage._cdata] = _Storage(storage)
            weakref.finalize(storage, self._release, storage._cdata, entry)
            self._resize(entry, storage.nbytes())

    def _note_pinned(self, storage: torch.UntypedStorage) -> None:
        """Note page-locked memory of the host."""
        entry = self._storages[storage._cdata] = _Storage(storage)
        weakref.finalize(storage, self._release, storage._cdata, entry)
        entry.num_bytes = storage.nbytes()
        entry.tensor = self.tape.new(entry.num_bytes, UNNAMED, HOST)

    def _layers(self, args: Any, count: int) -> list[int]:
        """Return the layers of `count` results of an operation."""
        if not self.tape.follows_tensors:
            return [self.tape.layer] * count
        first = args[0] if args else None
        if isinstance(first, list | tuple) and len(first) == count > 1:
            return [self._layer(tensor) for tensor in first]
        layers = {self._layer(tensor) for tensor in tensors(args) if self._number(tensor) >= 0}
        if not layers:
            return [self.tape.layer] * count
        return [layers.pop() if len(layers) == 1 else NONE] * count

    def _number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's memory on the tape, or -1."""
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        return entry.tensor if entry else -1

    def _layer(self, tensor: torch.Tensor) -> int:
        number = self._number(tensor)
        return self.tape.layer_of[number] if number >= 0 else self.tape.layer

    def assign(self, tensor: torch.Tensor, *, layer: int | None = None, term: str = "") -> None:
        """Set the layer or the term of a tensor."""
        values = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        number = self._number(values)
        if number >= 0 and layer is not None:
            self.tape.assign(number, layer)
        if number >= 0 and term:
            self.tape.terms[number] = term

    def _follow(self, written: Any) -> None:
        """Watch from now on the storages of tensors that an operation writes."""
        keys = (tensor.untyped_storage()._cdata for tensor in tensors(written))
        group = {key: self._storages[key] for key in keys if key in self._storages}
        if group:
            first = next(iter(group))
            self._gathered[first] = self._allocated[first] = [*group.values()]

    def note_resized(self) -> None:
        """Note the storages that FSDP2 has resized since the last operation."""
        self._note_resized(self._gathered)

    def _note_resized(self, groups: dict[int, list[_Storage]]) -> None:
        # Millions of calls in a recording: `_differs`, inlined.
        resized = [
            first
            for first, group in groups.items()
            for entry in (group[0], group[-1])
            if (storage := entry.reference()) is not None and storage.nbytes() != entry.num_bytes
        ]
        for first in resized:
            self._note_group(first)

    def _note_group(self, first: int) -> None:
        group = self._gathered[first]
        for entry in group:
            storage = entry.reference()
            if storage is not None and storage.nbytes() != entry.num_bytes:
                self._resize(entry, storage.nbytes())
        if group[0].num_bytes:
            self._allocated[first] = group
        else:
            self._allocated.pop(first, None)

    def _note_workspaces(self, func: Any, args: Any, result: Any) -> None:
        backward = torch._C._current_graph_task_id() != NO_TASK
        multiplying = (self._gpu.current_stream().stream_id, backward)
        if func.overloadpacket in MATMULS and multiplying not in self._multiplying:
            # cuBLAS takes one for each stream, and for each thread with matmuls: forward's, and
            # autograd's.
            self._multiplying.add(multiplying)
            self._new(WORKSPACE_BYTES, "cublas_workspace")
        sizes = workspaces(func, args, result)
        self.tape.free(*[self._new(size, UNNAMED) for size in sizes])

    def _resize(self, entry: _Storage, num_bytes: int) -> None:
        if entry.tensor >= 0:
            self.tape.free(entry.tensor)
            entry.tensor = -1
        entry.num_bytes = num_bytes
        if num_bytes:
            entry.tensor = self._new(num_bytes, made_by())

    def _new(self, num_bytes: int, term: str) -> int:
        number = self._gpu.current_stream().stream_id
        name = COMPUTE
        if number != COMPUTING:  # numbers continue from one recording to the next
            name = self._streams.setdefault(number, f"beside_{len(self._streams)}")
        return self.tape.new(num_bytes, term, name)

    def _release(self, key: int, entry: _Storage) -> None:
        if self._storages.get(key) is entry:  # else another storage has its address
            del self._storages[key]
            self._gathered.pop(key, None)
            self._allocated.pop(key, None)
        self._resize(entry, 0)


def _differs(entry: _Storage) -> bool:
    """Whether an existing storage has another size than the noted one."""
    storage = entry.reference()
    return storage is not None and storage.nbytes() != entry.num_bytes


def _reduced(func: Any, args: Any, options: Any) -> Any:
    """Run an all-reduce; numbers that the host knows stay known: all processes have the same."""
    constants = [tensor.constant for tensor in args[0]]
    result = func(*args, **options)
    for tensor, constant in zip(args[0], constants, strict=True):
        tensor.constant = constant
    return result
