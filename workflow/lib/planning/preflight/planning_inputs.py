"""From settings, shapes and a machine to what a plan is searched among (`search`): setup, sizes,
and the budget.

Nothing here reads a file or asks the machine: the caller passes `Machine`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from workflow.lib.model.architecture.adapter_targets import adapter_ranks, modules_to_save
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.memory import closed_form
from workflow.lib.planning.memory.setup import Attention, Setup
from workflow.lib.planning.memory.terms import hosted_bytes, moment_bytes, offloaded_bytes
from workflow.lib.settings.config import HardwareConfig, ModelConfig, RunConfig
from workflow.lib.system.errors import setting_error
from workflow.lib.system.gpu_models import automatic_dtype, dtype_lack
from workflow.lib.system.units import GIB

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"  # of all families that `model_shape` knows

# Resident set of a process besides the model, measured (docs/memory-model.md): on the CPU 0.43 GiB
# after the imports and 0.6 to 0.7 after some steps; with a GPU 2.2 GiB, CUDA's libraries and NCCL
# included.
CPU_PROCESS_BYTES = int(0.7 * GIB)
GPU_PROCESS_BYTES = int(2.5 * GIB)


@dataclass(frozen=True)
class Budget:
    """Memory that a process may take, bytes. On the CPU, its share of the host."""

    capacity_bytes: int
    outside_allocator_bytes: int
    margin_bytes: int
    host_capacity_bytes: int | None

    def slack_bytes(self, peak_bytes: int) -> int:
        """What the allocator reserves beyond what is allocated at the peak."""
        return int(peak_bytes * closed_form.ALLOCATOR_SLACK)

    def needed_bytes(self, peak_bytes: int) -> int:
        """All that must fit into the capacity for a predicted peak."""
        outside = self.outside_allocator_bytes + self.margin_bytes
        return peak_bytes + self.slack_bytes(peak_bytes) + outside

    def holds(self, peak_bytes: int) -> bool:
        """Whether a predicted peak fits."""
        return self.needed_bytes(peak_bytes) <= self.capacity_bytes


def budget(hardware: HardwareConfig, machine: Machine) -> Budget:
    """Return what a process may take.

    Raises `UserError` if `hardware.gpu_memory_gib` is more than the GPUs have.
    """
    host = machine.host_bytes
    if hardware.host_memory_gib != "auto":
        allowed = int(hardware.host_memory_gib * GIB)
        host = allowed if host is None else min(host, allowed)
    if machine.gpu_bytes is None:
        assert host is not None, "a machine without GPUs has memory of its own"
        return Budget(host // machine.processes_per_node, 0, 0, host)
    capacity = machine.gpu_bytes
    if hardware.gpu_memory_gib != "auto":
        capacity = int(hardware.gpu_memory_gib * GIB)
        if capacity > machine.gpu_bytes:
            raise setting_error(
                "hardware.gpu_memory_gib",
                hardware.gpu_memory_gib,
                f"the smallest GPU has {machine.gpu_bytes / GIB:.2f} GiB",
                "Set it to that or below, or to auto",
            )
    outside = (
        closed_form.CONTEXT_BYTES if machine.processes == 1 else closed_form.CONTEXT_AND_NCCL_BYTES
    )
    return Budget(capacity, outside, int(hardware.memory_margin_gib * GIB), host)


def rows_per_process(global_batch_size: int, *, processes: int) -> int:
    """Return the rows of a step that each process trains on; raises `UserError` if they are not
    whole.
    """
    if global_batch_size % processes == 0:
        return global_batch_size // processes
    below = global_batch_size // processes * processes
    nearest = [str(value) for value in (below, below + processes) if value]
    raise setting_error(
        "train.global_batch_size",
        global_batch_size,
        f"must be a multiple of the {processes} processes, which share its rows equally",
        f"Set it to {' or '.join(nearest)}, or change hardware.gpus (hardware.cpu_processes on the "
        "CPU)",
    )


def shard_size(wanted: int | str, *, processes: int) -> int:
    """Return how many processes share one copy of the model; raises `UserError` if that leaves some
    over.
    """
    if wanted == "auto":
        return processes
    size = int(wanted)
    if processes % size:
        raise setting_error(
            "hardware.shard_size",
            size,
            f"must divide the {processes} processes of the run into equal groups",
            f"Set it to {', '.join(map(str, divisors(processes)[1:])) or 'auto'}, or auto",
        )
    return size


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in increasing order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def micro_batch_sizes(wanted: int | str, *, rows: int, processes: int) -> list[int]:
    """Return the micro-batch sizes to consider: the one that is set, or all divisors of `rows`.

    Raises `UserError` if the one that is set does not divide the rows of a process.
    """
    valid = divisors(rows)
    if wanted == "auto":
        return valid
    if wanted not in valid:
        raise setting_error(
            "train.micro_batch_size",
            wanted,
            f"must divide the {rows} rows that each of {processes} processes has of a step",
            f"Set it to {', '.join(map(str, valid))}, or auto",
        )
    return [int(wanted)]


def compute_dtype(name: str, machine: Machine) -> str:
    """Return the type of activations, as `backends.resolve_dtype` will; raises `UserError` for one
    that the machine has not.
    """
    cuda = machine.device == "cuda"
    wanted = automatic_dtype(cuda=cuda, bfloat16=machine.bfloat16) if name == "auto" else name
    if lack := dtype_lack(wanted, cuda=cuda, bfloat16=machine.bfloat16):
        raise setting_error("model.compute_dtype", wanted, lack, "Set it to auto")
    return wanted


def attention_kind(model: ModelConfig, machine: Machine, *, softcapped: bool) -> Attention:
    """Return how attention uses memory, as `backends.resolve_training_attention` will decide.

    `auto` on a GPU in 16 bits is flash, of the flash-attn package or of torch; the latter cannot
    soft-cap.
    """
    if model.attention != "auto":
        flash = model.attention == "varlen" or model.attention.startswith("flash")
        return "flash" if flash else "eager" if model.attention == "eager" else "sdpa"
    half = compute_dtype(model.compute_dtype, machine) != "float32" and machine.bfloat16
    if machine.device == "cuda" and half and (machine.flash_attention or not softcapped):
        return "flash"
    return "eager" if softcapped else "sdpa"


def trained_modules(run: RunConfig, shape: ModelShape) -> set[str]:
    """Return which of embedding and head are trained whole; raises `UserError` as
    `adapter_targets.modules_to_save` does.
    """
    return modules_to_save(run.lora, embedding=EMBEDDING, head=HEAD, tied=shape.tied_embeddings)


def target_ranks(run: RunConfig, shape: ModelShape) -> dict[str, int]:
    """Return the rank of each adapted linear by its path; raises `UserError` as
    `adapter_targets.adapter_ranks` does.
    """
    return adapter_ranks(run.lora, linears=shape.linear_paths())


def make_setup(run: RunConfig, shape: ModelShape, machine: Machine) -> Setup:
    """Translate settings into what the bytes depend on, for a micro-batch of one row with
    recomputation.

    Raises `UserError` if a LoRA target is no linear of the model.
    """
    trained = trained_modules(run, shape)
    ranks = _largest_ranks(target_ranks(run, shape))
    cuda = machine.device == "cuda"
    dtype = compute_dtype(run.model.compute_dtype, machine)
    return Setup(
        processes=machine.processes,
        micro_batch_size=1,
        seq_len=run.data.seq_len,
        rank=run.lora.r,
        targets=tuple(x.name for x in shape.linears if x.name in ranks),
        ranks={name: rank for name, rank in ranks.items() if rank != run.lora.r},
        dora=run.lora.use_dora,
        dropout=run.lora.dropout > 0,
        block_size=run.quantize.block_size,
        double_quant=run.quantize.double_quant,
        activation_checkpointing=True,
        reshard_after_forward=run.hardware.reshard_after_forward is not False,
        fused_layers=run.train.fused_layers,
        offload_activations=_stashed(run.hardware.offload_activations, shape, machine),
        accumulates=True,
        compute_bytes=4 if dtype == "float32" else 2,
        attention=attention_kind(run.model, machine, softcapped=shape.attention_softcap),
        replicas=machine.processes
        // shard_size(run.hardware.shard_size, processes=machine.processes),
        offload_embedding=offloads_embedding(
            run.hardware.offload_embedding, shape, machine, trained=EMBEDDING in trained
        ),
        trains_head=HEAD in trained,
        trains_embedding=EMBEDDING in trained,
        optimizer=_optimizer(run.train.optimizer, machine),
        offload_layers=_offloaded_layers(run.hardware.offload_layers, shape, machine),
        fixed={"cublas_workspace": closed_form.CUBLAS_BYTES}
        if cuda
        else {"process": CPU_PROCESS_BYTES},
    )


def _stashed(wanted: bool | int | str, shape: ModelShape, machine: Machine) -> bool | int:
    """Return whether, or of how many layers, activations wait in host memory; `auto`: none, unless
    the search finds otherwise.

    Raises `UserError` if the model has fewer layers, or there is no other memory than the host's.
    """
    if isinstance(wanted, str):
        return False
    if wanted and machine.device == "cpu":
        raise setting_error(
            "hardware.offload_activations",
            wanted,
            "this run is on CPUs, whose activations are in host memory anyway",
            "Set it to auto or false, or use GPUs (hardware.gpus)",
        )
    if wanted > shape.num_layers:
        raise setting_error(
            "hardware.offload_activations",
            wanted,
            f"the model has {shape.num_layers} decoder layers",
            "Set it to that number or below, to true, or to auto",
        )
    return wanted


def _optimizer(name: str, machine: Machine) -> str:
    """Return the optimizer; raises `UserError` for one that pages to where the memory is anyway."""
    if name.startswith("paged") and machine.device == "cpu":
        raise setting_error(
            "train.optimizer",
            name,
            "this run is on CPUs, where no GPU's driver pages memory",
            f"Set it to {name.removeprefix('paged_')}",
        )
    return name


def _offloaded_layers(wanted: int | str, shape: ModelShape, machine: Machine) -> int:
    """Return how many layers' packed weights wait in host memory; raises `UserError` if there are
    not so many, or no GPU.

    `auto`: none, unless the search finds that some are needed.
    """
    if wanted == "auto":
        return 0
    if wanted and machine.device == "cpu":
        raise setting_error(
            "hardware.offload_layers",
            wanted,
            "this run is on CPUs, whose weights are in host memory anyway",
            "Set it to auto or 0, or use GPUs (hardware.gpus)",
        )
    if int(wanted) > shape.num_layers:
        raise setting_error(
            "hardware.offload_layers",
            wanted,
            f"the model has {shape.num_layers} decoder layers",
            "Set it to that number or below, or to auto",
        )
    return int(wanted)


def offloads_embedding(
    wanted: bool | str, shape: ModelShape, machine: Machine, *, trained: bool
) -> bool:
    """Return whether embedding rows are looked up in host memory; `auto`: by several GPUs, unless
    the table is trained.

    Raises `UserError` if that is set for a table that is trained, or where it would save nothing.
    """
    if trained and wanted is True:
        raise setting_error(
            "hardware.offload_embedding",
            True,
            "lora.modules_to_save trains the embedding, whose table is then on the devices",
            f"Set it to auto or false, or take {EMBEDDING.rpartition('.')[2]} out of "
            "lora.modules_to_save",
        )
    if trained:
        return False
    if wanted == "auto":
        return machine.device == "cuda" and machine.processes > 1
    if wanted and machine.device == "cpu":
        raise setting_error(
            "hardware.offload_embedding",
            True,
            "without a GPU there is no other memory than the host's",
            "Set it to auto or false",
        )
    if wanted and machine.processes == 1 and shape.tied_embeddings:
        raise setting_error(
            "hardware.offload_embedding",
            True,
            "this model's embedding is its output head too, which one GPU needs whole",
            "Set it to auto or false, or use more GPUs",
        )
    return bool(wanted)


def _largest_ranks(ranks: Mapping[str, int]) -> dict[str, int]:
    """Return the largest rank of any layer by the linear's name: memory is predicted as if all
    layers had that.
    """
    largest: dict[str, int] = {}
    for path, rank in ranks.items():
        name = path.rpartition(".")[2]
        largest[name] = max(rank, largest.get(name, 0))
    return largest


def host_bytes(shape: ModelShape, setup: Setup, machine: Machine, *, peak_bytes: int) -> int:
    """Return the host memory of all processes of a node together at the peak, for a predicted peak
    of each.

    With GPUs: each process itself, its offloaded activations and layers, paged moments, and all
    slices of the largest tensor while the weights are loaded; later the pages of an embedding's
    file take their place, once for all processes, and the rows of a micro-batch on their way.
    """
    if machine.device == "cpu":
        return machine.processes_per_node * peak_bytes
    table = shape.vocab_size * shape.hidden_size * shape.source_bytes
    rows = setup.tokens * shape.hidden_size * setup.compute_bytes if setup.offload_embedding else 0
    each = GPU_PROCESS_BYTES + offloaded_bytes(shape, setup) + hosted_bytes(shape, setup) + rows
    each += moment_bytes(shape, setup)[1]
    return machine.processes_per_node * each + table
