"""The exported files as one model whose weights are sharded over processes, for models larger than
one GPU.

Every process reads its slice of every tensor of base (or merged model) and adapter, and FSDP
gathers one decoder layer
at a time, as in training. So a forward is collective: `sharing` keeps the processes in step. The
modules are ours (`nf4`, `lora`) and not those of the stock reload (`inference`), to which a test
holds their numbers; that the stock packages read the export is proven when it is made (`parity`).

The order is fixed: meta device -> adapter -> sharding -> memory -> weights -> the adapter's values.
"""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import GenerationConfig, PreTrainedModel

from workflow.lib.distributed.fsdp import shard_for_inference_
from workflow.lib.distributed.world import World
from workflow.lib.export.stock_models import ADAPTER_WEIGHTS, refuse_unmatched
from workflow.lib.model.lora import adapted, trainable_parameters
from workflow.lib.model.nf4_model import (
    build_nf4_on_meta,
    load_weights_,
    local,
    local_range,
    materialize_,
)
from workflow.lib.model.safetensors_reader import CheckpointReader, check_whole


def load_sharded_base(
    folder: Path, *, world: World, compute_dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """Return the model in `folder` (NF4, or merged) in evaluation mode, a slice of each tensor
    here. Collective.

    Raises `UserError` if the folder does not hold every tensor of the model.
    """
    check_whole(folder)
    model = _on_meta(folder, compute_dtype=compute_dtype, attention=attention)
    shard_for_inference_(model, world.mesh)
    materialize_(model, transformers_model=model, device=world.device)
    load_weights_(model, folder)
    model.eval()
    return model


def load_sharded_adapter(
    folder: Path, adapter: Path, *, world: World, compute_dtype: torch.dtype, attention: str
) -> PeftModel:
    """Return the base in `folder` with the exported adapter on it, as `load_sharded_base`.
    Collective.

    PEFT's wrapper goes around FSDP's root: call the model inside (`get_base_model`), which has the
    adapter.
    Raises `UserError` also if adapter and model do not fit tensor by tensor.
    """
    check_whole(folder)
    check_whole(adapter, single=ADAPTER_WEIGHTS)
    model = _on_meta(folder, compute_dtype=compute_dtype, attention=attention)
    config = LoraConfig.from_pretrained(str(adapter))
    config.inference_mode = False  # no gradient is ever asked for, but it tells adapter from base
    config.base_model_name_or_path = str(folder)
    tuned = adapted(model, config)
    shard_for_inference_(model, world.mesh)
    materialize_(tuned, transformers_model=model, device=world.device)
    load_weights_(model, folder)
    _load_adapter_(tuned, adapter)
    tuned.eval()
    return tuned


def _on_meta(folder: Path, *, compute_dtype: torch.dtype, attention: str) -> PreTrainedModel:
    model = build_nf4_on_meta(folder, compute_dtype=compute_dtype, attention=attention)
    model.config.use_cache = True  # answers are generated
    if (folder / "generation_config.json").is_file():  # names the tokens that end an answer
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    return model


@torch.no_grad()
def _load_adapter_(tuned: PeftModel, folder: Path) -> None:
    """Fill this process's slices of the adapter."""
    places = trainable_parameters(tuned)
    with CheckpointReader(folder, single=ADAPTER_WEIGHTS) as reader:
        stored = set(reader.names())
        refuse_unmatched(
            folder,
            missing=places.keys() - stored,
            unexpected=stored - places.keys(),
            mismatched=[
                n for n in stored & places.keys() if reader.shape(n) != tuple(places[n].shape)
            ],
        )
        for name, param in places.items():
            local(param).copy_(reader.rows(name, *local_range(param)))
