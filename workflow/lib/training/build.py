"""From a plan to a model ready to train, in the one right order.

quantized linears -> adapters -> fused layers -> loss -> activation checkpointing -> packed weights
-> sharding -> memory -> weights -> adapter values -> loss scale and reference. `assemble_` is the
part without values, which a recording shares; `complete_` is what needs them."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.distributed.fsdp import shard_
from workflow.lib.distributed.packed_layers import PackedLayers, gather_layers_
from workflow.lib.distributed.world import World, decide_kernels
from workflow.lib.model.activation_offload import ActivationOffload
from workflow.lib.model.architecture.layer_choice import LayerChoice
from workflow.lib.model.backends import (
    resolve_dtype,
    resolve_matmul_dtype,
    resolve_training_attention,
)
from workflow.lib.model.fusion.fuse_layers import fuse_layers_, fuse_norms_between_
from workflow.lib.model.host_embedding import StoredRows, empty_table_
from workflow.lib.model.layers.frozen_linear import frozen_linears
from workflow.lib.model.lora import (
    adapter_config,
    init_adapters_,
    inject_adapters,
    module_kind,
    trainable_parameters,
)
from workflow.lib.model.loss.loss_scale import LossScale
from workflow.lib.model.nf4_model import build_base_on_meta, load_weights_, materialize_
from workflow.lib.model.recomputation import checkpoint_activations_
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.objectives.objective import Objective
from workflow.lib.settings.config import LoraSettings, RunConfig
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.dtype_choice import COMPUTE_DTYPE
from workflow.lib.system.errors import setting_error
from workflow.lib.training.start_adapter import load_start_
from workflow.lib.training.start_reference import StartReference

logger = logging.getLogger("workflow")


@dataclass(frozen=True)
class TrainingModel:
    """The sharded training module, its FSDP units, and the bytes that this process read."""

    training: CausalLMForTraining
    units: list[FSDPModule]
    bytes_read: int
    packed_layers: PackedLayers | None = None
    """Decoder layers whose packed weights are gathered layer by layer."""
    fused: Counter[str] = field(default_factory=Counter)
    """Number of fused modules of each kind (`fuse_layers`)."""
    continues: bool = False
    """Whether the trained weights begin with an adapter's values, not with the base's."""

    def adapter_config(self) -> dict[str, Any]:
        """Return the content of PEFT's `adapter_config.json`."""
        return adapter_config(self.training.peft_model)

    def state_bytes(self) -> int:
        """Return the bytes of trained state on all processes: fp32 weights and two moments."""
        return 12 * sum(p.numel() for p in trainable_parameters(self.training).values())

    def trainable_by_module(self) -> dict[str, int]:
        """Return the number of trained values by kind of module."""
        counts: Counter[str] = Counter()
        for name, param in trainable_parameters(self.training).items():
            counts[module_kind(name)] += param.numel()
        return dict(counts)

    def num_parameters(self) -> tuple[int, int]:
        """Return the trainable parameters, and all (quantized weights counted as weights)."""
        model = self.training.peft_model
        trainable = sum(p.numel() for p in trainable_parameters(self.training).values())
        linears = sum(m.in_features * m.out_features for _, m in frozen_linears(model))
        packed = {
            id(p) for _, m in frozen_linears(model) for n, p in m.named_parameters() if n != "bias"
        }
        plain = sum(p.numel() for p in model.parameters() if id(p) not in packed)
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        on_host = 0
        if not len(embedding.weight):  # rows are looked up in host memory
            on_host = embedding.num_embeddings * embedding.embedding_dim
        return trainable, linears + plain + on_host


def plan_of_device(plan: StepPlan, base: Checkpoint, config: RunConfig, world: World) -> StepPlan:
    """Return the plan with the settings' dtypes and attention on this device. Collective.

    Of `train.matmul_dtype: auto` the plan may have left out what the weights' shapes forbid."""
    settings, device = config.model, world.device
    dtype, needs = resolve_dtype(settings.compute_dtype, device), base.attention_needs
    training_needs = needs.with_dropout(settings.attention_dropout).over(plan.context_parallel)
    resolve = partial(
        resolve_training_attention, settings.attention, device, training_needs, compute_dtype=dtype
    )
    matmuls: str = config.train.matmul_dtype
    if matmuls == "auto" and plan.matmul_dtype == COMPUTE_DTYPE:
        matmuls = COMPUTE_DTYPE
    resolve()  # compares kernels with their references
    decide_kernels(world)
    attention = resolve()
    logger.info("attention: %s (%s)", attention.name, attention.reason)
    if note := needs.dropout_note(settings.attention_dropout):
        logger.info("%s", note)
    return replace(
        plan,
        compute_dtype=str(dtype).removeprefix("torch."),
        attention=attention.name,
        matmul_dtype=resolve_matmul_dtype(matmuls, device, compute_dtype=dtype),
    )


def build_training_model(
    base: Checkpoint,
    config: RunConfig,
    plan: StepPlan,
    world: World,
    *,
    start: Adapter | None = None,
) -> TrainingModel:
    """Build the run's model on this process. Collective. base: in NF4; plan: of
    `preflight.json`, for this device; start: a continued adapter. Raises `UserError` if the base
    does not fit its config, the targets or the adapter."""
    _limit_memory(plan, world.device)
    dtype = dtype_of(plan)
    model = build_base_on_meta(
        base,
        compute_dtype=dtype,
        attention=plan.attention,
        attention_dropout=plan.attention_dropout,
    )
    objective = objective_of(
        config.train.objective, config.preferences, config.distill, config.grpo
    )
    if config.lora.dropout and not objective.dropout:
        logger.info(
            "lora.dropout = %g is off: train.objective = %s has no dropout, as in TRL",
            *(config.lora.dropout, config.train.objective),
        )
    assembled = assemble_(
        model,
        plan,
        world,
        lora=config.lora,
        objective=objective,
        router_aux_loss_coef=config.train.router_aux_loss_coef,
        choice=plan.layers(len(decoder_layers(model))),
    )
    tile_tokens = config.hardware.tile_tokens
    if tile_tokens not in ("auto", 0) and not assembled.fused["tiled"]:
        raise setting_error(
            "hardware.tile_tokens",
            tile_tokens,
            f"the engine computes no feed-forward of {type(model).__name__} in one node",
            "Set it to auto or 0",
        )
    training, packed = assembled.training, assembled.packed_layers
    materialize_(training, transformers_model=model, device=world.device)
    with base.stored() as reader:
        bytes_read = load_weights_(model, reader, moved=world.moved)
        bytes_read += packed.load_(reader) if packed else 0
        if start is None:
            init_adapters_(training, seed=config.train.seed, base=reader)
        else:
            load_start_(training, start, config, base=reader)
        rows_of = None
        if plan.offload_embedding:
            rows_of = StoredRows(model, reader, device=world.device, dtype=dtype)
    complete_(training, plan, rows_of=rows_of)
    return replace(assembled, bytes_read=bytes_read, continues=start is not None)


def dtype_of(plan: StepPlan) -> torch.dtype:
    """Return the plan's compute dtype."""
    dtype: torch.dtype = getattr(torch, plan.compute_dtype)
    return dtype


def assemble_(
    model: PreTrainedModel,
    plan: StepPlan,
    world: World,
    *,
    lora: LoraSettings,
    objective: Objective,
    router_aux_loss_coef: float | None,
    choice: LayerChoice,
) -> TrainingModel:
    """Return the training model of a meta-device NF4 model: adapters, fused layers, loss,
    recomputation, and its division between processes and host memory. Allocates and reads nothing.
    Collective. choice: decoder layers of the plan's options. Raises `UserError` if the model has
    none of the targets, if a router or a float8 matmul cannot be trained, or if processes cannot
    share rows."""
    adapted = inject_adapters(model, lora)
    # Before recurrent layers are divided by document: that replaces their forward.
    fused = fuse_layers_(model) if plan.fused_layers else Counter()
    if plan.fused_layers and plan.tile_tokens:
        fused["norms"] += fuse_norms_between_(model.get_decoder())
    training = CausalLMForTraining(adapted, fused_head=plan.fused_loss, objective=objective)
    if plan.tile_tokens:
        fused["tiled"] = training.tile_(plan.tile_tokens)
    if plan.context_parallel > 1 and (obstacle := training.row_obstacle()):
        raise setting_error(
            "hardware.context_parallel", plan.context_parallel, obstacle, "Set it to 1"
        )
    if plan.offload_embedding:
        table = model.get_input_embeddings().weight
        assert not table.requires_grad, "preflight leaves a trained embedding on the device"
        empty_table_(model)
    kept = training.keep_attention_() if plan.keep_attention else None
    if choice.recomputed:
        checkpoint_activations_(model, choice.recomputed, kept=kept)
    training.multiply_in_(plan.matmul_dtype, plan.matmul_passes)
    training.keep_decoded_(choice.decoded)
    training.balance_routers_(router_aux_loss_coef)
    if plan.shares_prompts and (
        obstacle := training.share_prompts_(rows_are_cut=plan.context_parallel > 1)
    ):
        logger.info("every document has its own prompt: %s", obstacle)
    layers = decoder_layers(model)  # FSDP2 changes their classes
    keep_to_backward = not plan.reshard_after_forward
    packed = gather_layers_(
        model, choice.weights_on_host, keep_to_backward=keep_to_backward, world=world
    )
    training.packed_layers = packed
    units = _sharded(training, packed, plan, world)
    if plan.offload_window_bytes is not None:
        offload = ActivationOffload(world.device, window_bytes=plan.offload_window_bytes)
        training.activation_offload = offload
        if plan.offload_activations is not True:  # else also before and after them
            offload.follow_(layers, choice.activations_on_host)
        if kept is not None:
            kept.pack, kept.unpack = offload.pack, offload.unpack
    return TrainingModel(training, units, 0, packed, fused)


def complete_(
    training: CausalLMForTraining,
    plan: StepPlan,
    *,
    rows_of: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    """Set the parts that need the trained values, which exist now; rows_of: embedding rows (n,
    hidden) of ids (n,) from host memory, None where the device has the embedding."""
    if rows_of is not None:
        training.rows_of = rows_of
    if plan.compute_dtype == "float16":
        training.loss_scale = LossScale()
    if plan.start_reference:
        training.reference = StartReference(training)


def _limit_memory(plan: StepPlan, device: torch.device) -> None:
    """Limit torch's allocator to the plan's memory of a GPU."""
    if device.type == "cuda" and plan.gpu_memory_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, plan.gpu_memory_bytes / total))


def _sharded(
    training: CausalLMForTraining, packed: PackedLayers | None, plan: StepPlan, world: World
) -> list[FSDPModule]:
    """Shard the model over all processes; return its units, none for a single process."""
    if world.size == 1:
        return []
    ignored = packed.parameters() if packed else None
    reshard = plan.reshard_after_forward
    return shard_(training, world.mesh, reshard_after_forward=reshard, ignored=ignored)
