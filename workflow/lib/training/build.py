"""From a plan to a model ready to train, in the one order that is right; and the checks before the
first step.

quantized linears -> adapters -> fused layers -> activation checkpointing -> layers on the host ->
sharding -> memory -> weights -> adapter values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from workflow.lib.artifacts.preflight_record import Plan
from workflow.lib.distributed.fsdp import shard_
from workflow.lib.distributed.layer_offload import HostedLayers, host_layers
from workflow.lib.distributed.world import World
from workflow.lib.model.activation_offload import Stash
from workflow.lib.model.architecture.layer_choice import stashed_layers
from workflow.lib.model.decoder_layers import checkpoint_activations_, decoder_layers
from workflow.lib.model.fuse_layers import fuse_layers_
from workflow.lib.model.host_embedding import StoredRows, empty_table_
from workflow.lib.model.layers.nf4_linear import nf4_linears
from workflow.lib.model.lora import ADAPTER, init_adapters_, inject_adapters, trainable_parameters
from workflow.lib.model.loss_scale import LossScale
from workflow.lib.model.nf4_model import build_nf4_on_meta, load_weights_, materialize_
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.settings.config import RunConfig


@dataclass(frozen=True)
class TrainingModel:
    """The sharded training module, its FSDP units (none with one process), and the bytes this
    process read.
    """

    training: CausalLMForTraining
    units: list[FSDPModule]
    bytes_read: int
    hosted: HostedLayers | None = None
    """Layers whose packed weights wait in host memory."""

    def adapter_config(self) -> dict[str, Any]:
        """Return the content of PEFT's `adapter_config.json`."""
        config = self.training.peft_model.peft_config[ADAPTER].to_dict()  # type: ignore[union-attr, index]
        return {
            key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
            for key, value in config.items()
        } | {"inference_mode": True}

    def state_bytes(self) -> int:
        """Return the bytes of what training changes, over all processes: fp32 weights and Adam's
        two moments.
        """
        return 12 * sum(p.numel() for p in trainable_parameters(self.training).values())

    def num_parameters(self) -> tuple[int, int]:
        """Return the trainable parameters, and all (quantized weights counted as weights, not as
        bytes).
        """
        model = self.training.peft_model
        trainable = sum(p.numel() for p in trainable_parameters(self.training).values())
        linears = sum(m.in_features * m.out_features for _, m in nf4_linears(model))
        packed = {
            id(p) for _, m in nf4_linears(model) for n, p in m.named_parameters() if n != "bias"
        }
        plain = sum(p.numel() for p in model.parameters() if id(p) not in packed)
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        looked_up = (
            0 if len(embedding.weight) else embedding.num_embeddings * embedding.embedding_dim
        )
        return trainable, linears + plain + looked_up


def build_training_model(
    base: Path,
    config: RunConfig,
    plan: Plan,
    world: World,
    *,
    compute_dtype: torch.dtype,
    attention: str,
    moved: Callable[[], None] = lambda: None,
) -> TrainingModel:
    """Build the run's model on this process. Collective.

    base: NF4 folder; plan: of `preflight.json`; moved: called after every tensor that was read.
    Raises `UserError` if the base does not fit its config or the targets.
    """
    if world.device.type == "cuda" and plan.gpu_memory_bytes is not None:
        total = torch.cuda.get_device_properties(world.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, plan.gpu_memory_bytes / total))
    model: PreTrainedModel = build_nf4_on_meta(
        base, compute_dtype=compute_dtype, attention=attention
    )
    training = CausalLMForTraining(inject_adapters(model, config.lora))
    if config.train.fused_layers:
        fuse_layers_(model)
    if plan.offload_embedding:
        assert training.rows_of is None, "preflight leaves a trained embedding on the device"
        empty_table_(model)
    if plan.activation_checkpointing:
        checkpoint_activations_(model, every=int(plan.activation_checkpointing))
    layers = decoder_layers(model)  # FSDP2 changes their classes
    hosted = host_layers(model, count=plan.offload_layers, world=world)
    units: list[FSDPModule] = []
    if world.size > 1:
        ignored = hosted.parameters() if hosted else None
        reshard = plan.reshard_after_forward
        units = shard_(training, world.mesh, reshard_after_forward=reshard, ignored=ignored)
    materialize_(training, transformers_model=model, device=world.device)
    bytes_read = load_weights_(model, base, moved=moved)
    bytes_read += hosted.load_(base, moved=moved) if hosted else 0
    if plan.offload_embedding:
        training.rows_of = StoredRows(model, base, device=world.device, dtype=compute_dtype)
    init_adapters_(training, seed=config.train.seed, base=base)
    if compute_dtype == torch.float16:
        training.loss_scale = LossScale()
    if plan.offload_window_bytes is not None:
        training.stash = Stash(world.device, window_bytes=plan.offload_window_bytes)
        _choose_stashed(training.stash, layers, plan)
    return TrainingModel(training, units, bytes_read, hosted)


def _choose_stashed(stash: Stash, layers: list[nn.Module], plan: Plan) -> None:
    """Have the stash take what the plan's layers save alone, if the plan names a number of them."""
    wanted = plan.offload_activations
    if wanted is not True:
        every = int(plan.activation_checkpointing)
        numbers = stashed_layers(wanted, recomputed_every=every, num_layers=len(layers))
        stash.follow_(layers, numbers)
