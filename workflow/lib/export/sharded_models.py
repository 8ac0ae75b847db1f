"""The exported files as one model whose weights are sharded over processes, for models larger than
one GPU.

Every process reads its slice of every tensor of base (or merged model) and adapter, and FSDP
gathers one decoder layer at a time, as in training. So a forward is collective: `work_sharing`
keeps the processes in step. The modules are ours (`nf4`, `lora`), not those of the stock reload
(`stock_models`), with which a test compares their numbers; `parity` proves at the export that stock
packages read it.

The order is fixed: meta device -> adapter -> sharding -> memory -> weights -> the adapter's
values."""

import torch
from peft import LoraConfig, PeftModel
from transformers import GenerationConfig, PreTrainedModel

from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.safetensors_reader import check_whole
from workflow.lib.distributed.fsdp import shard_for_inference_
from workflow.lib.distributed.world import World
from workflow.lib.export.stock_models import refuse_unmatched
from workflow.lib.model.layers.rotary_by_length import rotate_by_call_alone_
from workflow.lib.model.lora import adapted, train_rows_, trainable_parameters, write_rows_
from workflow.lib.model.nf4_model import (
    build_base_on_meta,
    load_weights_,
    local,
    local_range,
    materialize_,
)


def load_sharded_base(
    checkpoint: Checkpoint, *, world: World, compute_dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """Return a model (a base, or merged) in evaluation mode, a slice of each tensor
    here. Collective. Raises `UserError` if the folder does not hold every tensor of the model."""
    check_whole(checkpoint.folder)
    model = _on_meta(checkpoint, compute_dtype=compute_dtype, attention=attention)
    shard_for_inference_(model, world.mesh)
    materialize_(model, transformers_model=model, device=world.device)
    with checkpoint.reader() as reader:
        load_weights_(model, reader)
    model.eval()
    return model


def load_sharded_adapter(
    base: Checkpoint, adapter: Adapter, *, world: World, compute_dtype: torch.dtype, attention: str
) -> PeftModel:
    """Return the base with the exported adapter on it, as `load_sharded_base`.
    Collective. PEFT's wrapper goes around FSDP's root: call the model inside (`get_base_model`),
    which has the adapter. Raises `UserError` also if adapter and model do not fit tensor by
    tensor."""
    check_whole(base.folder)
    adapter.check_exported()
    model = _on_meta(base, compute_dtype=compute_dtype, attention=attention)
    config = LoraConfig.from_pretrained(str(adapter.folder))
    config.target_modules, config.target_parameters = adapter.targets, None
    config.trainable_token_indices = None  # PEFT's own layer reads a whole table
    config.inference_mode = False  # distinguishes adapter from base; no gradient is computed
    config.base_model_name_or_path = str(base.folder)
    tuned = adapted(model, config)
    train_rows_(model)
    shard_for_inference_(model, world.mesh)
    model.register_forward_pre_hook(lambda model, _: write_rows_(model), prepend=True)
    materialize_(tuned, transformers_model=model, device=world.device)
    with base.reader() as reader:
        load_weights_(model, reader)
    _load_adapter_(tuned, adapter)
    tuned.eval()
    return tuned


def _on_meta(
    checkpoint: Checkpoint, *, compute_dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    model = build_base_on_meta(checkpoint, compute_dtype=compute_dtype, attention=attention)
    model.config.use_cache = True  # answers are generated
    rotate_by_call_alone_(model)
    folder = checkpoint.folder
    if (folder / "generation_config.json").is_file():  # names the tokens that end an answer
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    return model


@torch.no_grad()
def _load_adapter_(tuned: PeftModel, adapter: Adapter) -> None:
    params = trainable_parameters(tuned)
    exported = {adapter.names.exported(name): param for name, param in params.items()}
    with adapter.reader() as reader:
        stored = set(reader.names())
        refuse_unmatched(
            adapter.folder,
            missing=exported.keys() - stored,
            unexpected=stored - exported.keys(),
            mismatched=[
                n for n in stored & exported.keys() if reader.shape(n) != tuple(exported[n].shape)
            ],
        )
        for name, param in exported.items():
            local(param).copy_(reader.rows(name, *local_range(param)))
