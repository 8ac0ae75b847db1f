"""From settings, shapes and a machine to the requested plan, and the micro-batch sizes that the
search tries (`plan_search`).

Nothing here reads a file or the hardware: the caller passes `Machine`."""

from collections.abc import Mapping
from typing import Any

from workflow.lib.checkpoints.files.attention_needs import family_needs
from workflow.lib.kernels.attention.attention_choice import (
    BY_SETTING,
    FLEX,
    VARLEN,
    AttentionChoice,
    AttentionNeeds,
    attention_obstacle,
    automatic_attention,
)
from workflow.lib.model.architecture.adapter_targets import (
    WholeModules,
    adapter_ranks,
    modules_to_save,
)
from workflow.lib.model.architecture.kept_linears import checked_linears, kept_linears
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.architecture.routers import balance_coefficient
from workflow.lib.planning.machine import Machine
from workflow.lib.settings.config import HardwareConfig, ModelConfig, QuantizeConfig, RunConfig
from workflow.lib.settings.objectives import NEEDS, reads_start
from workflow.lib.step_plan.memory_options import TABLE, Circumstances, MemoryOption, Value
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.dtype_choice import (
    COMPUTE_DTYPE,
    FLOAT8,
    MatmulHardware,
    check_float8_shape,
    choose_dtype,
    choose_matmul_dtype,
)
from workflow.lib.system.errors import UserError, setting_error


def rows_per_process(global_batch_size: int, *, processes: int, sharing: int = 1) -> int:
    """Return the rows of a step for each process, of which `sharing` have the same; raises
    `UserError` if they are not whole."""
    groups = processes // sharing
    if global_batch_size % groups == 0:
        return global_batch_size // groups
    below = global_batch_size // groups * groups
    nearest = [str(value) for value in (below, below + groups) if value]
    sharers = f"groups of {sharing} processes" if sharing > 1 else "processes"
    raise setting_error(
        "train.global_batch_size",
        global_batch_size,
        f"must be a multiple of the {groups} {sharers}, which share its rows equally",
        f"Set it to {' or '.join(nearest)}, or change hardware.gpus (hardware.cpu_processes on the "
        "CPU)",
    )


def shard_size(wanted: int | str, *, processes: int) -> int:
    """Return how many processes share a copy of the model; raises `UserError` for a remainder."""
    if wanted == "auto":
        return processes
    size = int(wanted)
    if processes % size:
        numbers = ", ".join(map(str, divisors(processes)[1:]))
        raise setting_error(
            "hardware.shard_size",
            size,
            f"must divide the {processes} processes of the run into equal groups",
            f"Set it to {numbers}, or auto" if numbers else "Set it to auto",
        )
    return size


def context_parallel(hardware: HardwareConfig, *, processes: int) -> int:
    """Return how many processes share a row, of `auto` the first number that the search tries;
    raises `UserError` unless they divide those that share a copy of the model."""
    wanted, shards = hardware.context_parallel, shard_size(hardware.shard_size, processes=processes)
    size = 1 if wanted == "auto" else wanted
    if shards % size:
        raise setting_error(
            "hardware.context_parallel",
            size,
            f"must divide the {shards} processes that share the weights",
            f"Set it to {', '.join(map(str, divisors(shards)))}",
        )
    return size


def check_slices(run: RunConfig, shape: ModelShape, attention: str, *, size: int) -> None:
    """Raise `UserError` if `size` processes cannot share rows of this length, or of this model by
    this attention."""
    if size == 1:
        return
    seq_len = run.data.seq_len
    heads = min((kind.num_heads for kind in shape.kinds if kind.attention != "none"), default=0)
    flex_obstacle = attention_needs(shape).with_dropout(run.model.attention_dropout).flex_obstacle()
    lower, never = "Set it to that or below", "Set it to 1"
    for applies, reason, change in (
        (size > seq_len, f"a row has {seq_len} tokens (data.seq_len)", lower),
        (
            any(kind.recurrent for kind in shape.kinds),
            f"layers of {shape.family} keep a state along the tokens of a row",
            never,
        ),
        (
            shape.rotates_by_length,
            "this model's rotary frequencies depend on the lengths of documents",
            never,
        ),
        (
            attention not in (VARLEN, FLEX),
            f"only varlen and flex exchange heads, and flex cannot: {flex_obstacle}",
            never,
        ),
        (size > heads, f"a layer has {heads} heads, which the processes share", lower),
    ):
        if applies:
            raise setting_error("hardware.context_parallel", size, reason, change)


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in increasing order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def micro_batch_sizes(wanted: int | str, *, rows: int, processes: int) -> list[int]:
    """Return the micro-batch sizes to consider: the one that is set, or all divisors of `rows`.
    Raises `UserError` if a set one does not divide the rows of a process."""
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


def compute_dtype(model: ModelConfig, machine: Machine) -> str:
    """Return the dtype of activations; raises `UserError` if the machine lacks it."""
    return choose_dtype(
        model.compute_dtype, cuda=machine.device == "cuda", bfloat16=machine.bfloat16
    )


def matmul_dtype(run: RunConfig, shape: ModelShape, machine: Machine) -> str:
    """Return the matmul dtype of training, of `auto` one that all weights can have; raises
    `UserError` if the machine lacks it, or a weight's shape is in the way."""
    dtype, setting = compute_dtype(run.model, machine), run.train.matmul_dtype
    hardware = MatmulHardware(machine.device == "cuda", machine.float8)
    chosen = choose_matmul_dtype(setting, hardware, compute_dtype=dtype)
    try:
        if chosen == FLOAT8:
            _check_float8_shapes(run.quantize, shape)
    except UserError:
        if setting != "auto":
            raise
        return COMPUTE_DTYPE
    return chosen


def _check_float8_shapes(quantize: QuantizeConfig, shape: ModelShape) -> None:
    linears = shape.linears_by_path()
    kept = kept_linears(quantize.kept, linears)
    for path, linear in linears.items():
        size = (linear.out_features, linear.in_features)
        check_float8_shape(path, size, block_size=1 if path in kept else quantize.block_size)


def training_attention(
    model: ModelConfig, machine: Machine, needs: AttentionNeeds
) -> AttentionChoice:
    """Return training's attention, with its reason. needs: of the model (`attention_needs`). Raises
    `UserError` if a set one cannot run there."""
    needs = needs.with_dropout(model.attention_dropout)
    circumstances: Any = {
        "cuda": machine.device == "cuda",
        "bfloat16": machine.bfloat16,
        "compute_dtype": compute_dtype(model, machine),
    }
    if model.attention != "auto":
        obstacle = attention_obstacle(model.attention, needs, **circumstances)
        if obstacle is not None:
            raise setting_error(
                "model.attention",
                model.attention,
                obstacle,
                "Set it to auto" if needs.rows_shared else "Set it to auto or eager",
            )
        return AttentionChoice(model.attention, BY_SETTING)
    return automatic_attention(
        needs, flash_package=machine.flash_attention, training=True, **circumstances
    )


def attention_needs(shape: ModelShape) -> AttentionNeeds:
    """Return a model's attention needs, as training reads them from config.json."""
    return AttentionNeeds(
        softcap=any(kind.attention_softcap for kind in shape.kinds),
        sinks=any(kind.sinks for kind in shape.kinds),
        chunks=any(kind.attention == "chunked" for kind in shape.kinds),
        head_dim=shape.largest(lambda layer: layer.head_dim),
        value_dim=shape.largest(lambda layer: layer.value_head),
        dropout=shape.attention_dropout,
        masked=shape.masked,
        **family_needs(shape.family),
    )


def trained_modules(run: RunConfig, shape: ModelShape) -> set[str]:
    """Return which of embedding, head and routers are trained; raises as `modules_to_save` does."""
    offered = WholeModules(
        embedding=shape.embedding,
        head=shape.head,
        tied=shape.tied_embeddings,
        routers=tuple(shape.router_paths()),
    )
    return modules_to_save(run.lora, offered, others=shape.linear_paths())


def router_aux_loss_coef(run: RunConfig, shape: ModelShape) -> float:
    """Return the coefficient of the router's loss, 0 without; raises `UserError` for none."""
    trained = not trained_modules(run, shape).isdisjoint(shape.router_paths())
    return balance_coefficient(
        run.train.router_aux_loss_coef,
        shape.router_aux_loss_coef,
        routers_trained=trained,
        name=shape.family,
    )


def target_ranks(run: RunConfig, shape: ModelShape) -> dict[str, int]:
    """Return the rank of each adapted linear by path; raises as `adapter_targets.adapter_ranks`."""
    stacks = [
        f"{shape.layers}.{number}.{linear.path}"
        for number in range(shape.num_layers)
        for linear in shape.layer(number).linears
        if linear.experts > 1
    ]
    return adapter_ranks(run.lora, linears=shape.linear_paths(), stacks=stacks)


def plan_from_settings(run: RunConfig, shape: ModelShape, machine: Machine) -> StepPlan:
    """Return the plan of the settings, with micro-batches of one row and recomputation of all
    layers where the search decides. Raises `UserError` if a LoRA target is no linear of the
    model."""
    trained = trained_modules(run, shape)
    ranks = _largest_ranks(target_ranks(run, shape))
    sharing = context_parallel(run.hardware, processes=machine.processes)
    needs = attention_needs(shape).over(sharing)
    attention = training_attention(run.model, machine, needs).name
    check_slices(run, shape, attention, size=sharing)
    plan = StepPlan(
        device=machine.device,
        processes=machine.processes,
        nodes=machine.nodes,
        context_parallel=sharing,
        replicas=machine.processes
        // shard_size(run.hardware.shard_size, processes=machine.processes),
        micro_batch_size=1,
        accumulation_steps=rows_per_process(
            run.train.global_batch_size, processes=machine.processes, sharing=sharing
        ),
        seq_len=run.data.seq_len,
        compute_dtype=compute_dtype(run.model, machine),
        attention=attention,
        attention_dropout=needs.with_dropout(run.model.attention_dropout).dropout > 0,
        matmul_dtype=matmul_dtype(run, shape, machine),
        matmul_passes=run.train.matmul_passes,
        objective=run.train.objective,
        shares_prompts=run.preferences.shared_prompt
        and NEEDS[run.train.objective].examples != "texts",
        start_reference=reads_start(run.train.objective, run.preferences),
        top_k=run.distill.top_k if run.train.objective == "distill" else 0,
        optimizer=run.train.optimizer,
        rank=run.lora.r,
        ranks={name: rank for name, rank in ranks.items() if rank != run.lora.r},
        targets=tuple(name for name in shape.linear_names if name in ranks),
        dora=run.lora.use_dora,
        dropout=run.lora.dropout,
        trains_head=shape.head in trained,
        trains_embedding=shape.embedding in trained,
        routers=_trained_routers(shape, trained),
        balances_routers=router_aux_loss_coef(run, shape) > 0,
        kept=_kept(run, shape, machine),
        block_size=run.quantize.block_size,
        double_quant=run.quantize.double_quant,
    )
    where = circumstances(run, shape, machine)
    options = {x.field: x.settled(wanted(run, x), plan, where) for x in TABLE}
    return plan.changed(options)


def wanted(run: RunConfig, option: MemoryOption) -> Value:
    """Return the setting of a memory option."""
    section, _, name = option.setting.partition(".")
    value: Value = getattr(getattr(run, section), name)
    return value


def circumstances(run: RunConfig, shape: ModelShape, machine: Machine) -> Circumstances:
    """Return a machine's, a model's and a run's facts for memory options."""
    gated = run.train.fused_layers and any(kind.has_gated_feed_forward for kind in shape.kinds)
    sharing = context_parallel(run.hardware, processes=machine.processes)
    return Circumstances(
        cuda=machine.device == "cuda",
        processes=machine.processes,
        num_layers=shape.num_layers,
        tied_embeddings=shape.tied_embeddings,
        embedding=shape.embedding,
        seq_len=-(-run.data.seq_len // sharing),
        tileable=gated or any(kind.top_k for kind in shape.kinds),
    )


def _kept(run: RunConfig, shape: ModelShape, machine: Machine) -> tuple[str, ...]:
    """Return the expressions of linears in 16 bits; raises as `checked_linears`, and for `auto`
    without GPUs."""
    if run.quantize.measures and machine.device != "cuda":
        raise setting_error(
            "quantize.keep",
            "auto",
            "it fills the memory of GPUs, and the run has none (hardware.gpus)",
            "Name linears, or set quantize.method to none",
        )
    checked_linears(run.quantize, shape.linear_paths())
    return run.quantize.kept


def _trained_routers(shape: ModelShape, trained: set[str]) -> tuple[str, ...]:
    """Return the paths in a layer of all trained routers: predicted as if all layers had them."""
    inside = {path for kind in shape.kinds for path in kind.routers}
    return tuple(sorted(x for x in inside if any(path.endswith(f".{x}") for path in trained)))


def _largest_ranks(ranks: Mapping[str, int]) -> dict[str, int]:
    """Return the largest rank of any layer by linear's name: predicted as if all had it."""
    largest: dict[str, int] = {}
    for path, rank in ranks.items():
        name = path.rpartition(".")[2]
        largest[name] = max(rank, largest.get(name, 0))
    return largest
