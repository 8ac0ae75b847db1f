"""From a plan to a model ready to train, in the one order that is right; and the checks before the first step.

quantized linears -> adapters -> fused layers -> activation checkpointing -> layers on the host -> sharding -> memory -> weights -> adapter values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from workflow.lib.batches import make_batch
from workflow.lib.config import RunConfig
from workflow.lib.embedding import StoredRows, empty_table_
from workflow.lib.errors import UserError
from workflow.lib.fused import fuse_layers_
from workflow.lib.hosted import HostedLayers, host_layers
from workflow.lib.lora import ADAPTER, init_adapters_, inject_adapters, trainable_parameters
from workflow.lib.loss import CausalLMForTraining
from workflow.lib.loss_scale import LossScale
from workflow.lib.model import build_nf4_on_meta, load_weights_, materialize_
from workflow.lib.nf4 import nf4_linears
from workflow.lib.parallel import (
    checkpoint_activations_,
    decoder_layers,
    fair_share,
    local_bytes,
    mismatched_tensors,
    shard_,
)
from workflow.lib.slices import stashed_layers
from workflow.lib.stash import Stash
from workflow.lib.tokens import TokenStore
from workflow.lib.weights import CheckpointReader
from workflow.lib.world import World

FAMILY_TOKENS = 8  # compared with the family's own forward
FAMILY_TOLERANCE = (
    0.05  # of the largest logit: far above bf16's rounding, far below any scale or cap
)


@dataclass(frozen=True)
class TrainingModel:
    """The sharded training module, its FSDP units (none with one process), and the bytes this process read."""

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
        """Return the bytes of what training changes, over all processes: fp32 weights and Adam's two moments."""
        return 12 * sum(p.numel() for p in trainable_parameters(self.training).values())

    def num_parameters(self) -> tuple[int, int]:
        """Return the trainable parameters, and all (quantized weights counted as weights, not as bytes)."""
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
    plan: dict[str, Any],
    world: World,
    *,
    compute_dtype: torch.dtype,
    attention: str,
    moved: Callable[[], None] = lambda: None,
) -> TrainingModel:
    """Build the run's model on this process. Collective.

    base: NF4 folder; plan: of `preflight.json`; moved: called after every tensor that was read. Raises `UserError` if the base does not fit its config or the targets.
    """
    if world.device.type == "cuda" and plan["gpu_memory_bytes"] is not None:
        total = torch.cuda.get_device_properties(world.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, plan["gpu_memory_bytes"] / total))
    model: PreTrainedModel = build_nf4_on_meta(
        base, compute_dtype=compute_dtype, attention=attention
    )
    training = CausalLMForTraining(inject_adapters(model, config.lora))
    if config.train.fused_layers:
        fuse_layers_(model)
    if plan["offload_embedding"]:
        assert training.rows_of is None, "preflight leaves a trained embedding on the device"
        empty_table_(model)
    if plan["activation_checkpointing"]:
        checkpoint_activations_(model, every=int(plan["activation_checkpointing"]))
    layers = decoder_layers(model)  # FSDP2 changes their classes
    hosted = host_layers(model, count=plan["offload_layers"], world=world)
    units: list[FSDPModule] = []
    if world.size > 1:
        ignored = hosted.parameters() if hosted else None
        reshard = plan["reshard_after_forward"]
        units = shard_(training, world.mesh, reshard_after_forward=reshard, ignored=ignored)
    materialize_(training, transformers_model=model, device=world.device)
    bytes_read = load_weights_(model, base, moved=moved)
    bytes_read += hosted.load_(base, moved=moved) if hosted else 0
    if plan["offload_embedding"]:
        training.rows_of = StoredRows(model, base, device=world.device, dtype=compute_dtype)
    init_adapters_(training, seed=config.train.seed, base=base)
    if compute_dtype == torch.float16:
        training.loss_scale = LossScale()
    if plan["offload_window_bytes"] is not None:
        training.stash = Stash(world.device, window_bytes=plan["offload_window_bytes"])
        _choose_stashed(training.stash, layers, plan)
    return TrainingModel(training, units, bytes_read, hosted)


def _choose_stashed(stash: Stash, layers: list[nn.Module], plan: dict[str, Any]) -> None:
    """Have the stash take what the plan's layers save alone, if the plan names a number of them."""
    wanted = plan["offload_activations"]
    if wanted is not True:
        every = int(plan["activation_checkpointing"])
        numbers = stashed_layers(wanted, recomputed_every=every, num_layers=len(layers))
        stash.follow_(layers, numbers)


def startup_checks(
    model: TrainingModel,
    store: TokenStore,
    base: Path,
    world: World,
    *,
    moved: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Check what must hold before the first step; return the checks for the report. Calls `moved` on its way. Collective.

    Raises `UserError` if our logits are not the family's, a gathered tensor differs from the checkpoint, or a row
    has no trained token.
    """
    model.training.eval()  # no dropout: it would make two forwards differ
    same_logits = check_family(model.training, store, world)
    moved()
    with torch.no_grad():  # one forward on the first row sets FSDP up
        batch = make_batch(
            store.input_ids[:1].astype("int64"), store.position_ids[:1].astype("int64"),
            store.loss_mask[:1].copy(), device=world.device,
        )  # fmt: skip
        model.training(
            batch.input_ids, batch.position_ids, batch.positions, batch.targets, batch.bounds
        )
    with CheckpointReader(base) as reader:
        wrong = mismatched_tensors(model.training, model.units, reader, world, moved=moved)
        wrong += model.hosted.mismatched(reader, moved=moved) if model.hosted else []
        count = len(reader.names())
    if wrong:
        raise UserError(
            f"{len(wrong)} tensors differ from the checkpoint after gathering, first {wrong[0]}: the weights would "
            "be silently wrong. Check the files in "
            f"{base} (SHA256SUMS); if they are whole, report this with your versions of torch and NCCL."
        )
    held, total = local_bytes(model.training)
    fewest = int(store.trained_tokens_per_row.min())
    if fewest == 0:
        raise UserError(
            "a training row has no trained token. Check data.loss_on, and tokenize again."
        )
    return [
        same_logits,
        _check(
            f"gathered bytes equal checkpoint bytes ({count} tensors, {world.size} processes)",
            True,
            "0 differ",
        ),
        _check(
            "every process holds its share of the parameters",
            held <= fair_share(model.training, shards=world.shard_size) * 1.02 + 65536,
            f"{held:,} of {total:,} bytes on rank {world.rank}, {world.shard_size} processes share a copy"
            + (
                f"; {model.hosted.host_bytes:,} bytes of {len(model.hosted)} layers in host memory"
                if model.hosted
                else ""
            ),
        ),
        _check("every row has trained tokens", True, f"fewest {fewest} of {store.seq_len}"),
    ]


@torch.no_grad()
def check_family(training: CausalLMForTraining, store: TokenStore, world: World) -> dict[str, Any]:
    """Compare our logits with those of the family's own forward, which may do more after its head than we know.

    Raises `UserError` if they differ. Collective.
    """
    ids = torch.from_numpy(store.input_ids[:1, :FAMILY_TOKENS].astype("int64")).to(world.device)
    places = torch.arange(ids.shape[1], device=world.device)
    theirs = training.family_logits(ids, places[None])
    difference = float((training(ids, places[None], places, None) - theirs).abs().max())
    largest = float(theirs.abs().max())
    if not difference <= FAMILY_TOLERANCE * largest:
        family = type(training.peft_model.get_base_model()).__name__  # type: ignore[operator]
        raise UserError(
            f"{family} is not supported: its logits differ by {difference:.3g} (of {largest:.3g}) from the product of "
            "hidden states and head, so the loss would be another model's. Choose another model.source."
        )
    return _check(
        "logits equal those of the model family's own forward",
        True,
        f"largest difference {difference:.2g} of {largest:.3g} over {len(places)} tokens",
    )


def _check(name: str, passed: bool, detail: str) -> dict[str, Any]:
    return {"name": name, "passed": passed, "detail": detail}
