"""Adapters: injected by PEFT, so that names, configuration and files are PEFT's; computed by fused
nodes.

`lora_linear.FusedLoraLinear` is registered as PEFT's layer for `FrozenLinear` (PEFT's custom-module
dispatch)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from workflow.lib.checkpoints.files.stack_names import PREFIX
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.model.adaptable_linears import excluded_pattern
from workflow.lib.model.architecture.adapter_targets import adapter_ranks
from workflow.lib.model.experts.expert_matmul import FusedLoraStack
from workflow.lib.model.layers.frozen_linear import FrozenLinear, frozen_linears
from workflow.lib.model.layers.frozen_stack import FrozenStack
from workflow.lib.model.layers.lora_linear import ADAPTER, FusedLoraLinear
from workflow.lib.model.nf4_model import (
    checkpoint_name,
    local,
    local_range,
    read_row_norms,
    without_cast,
)
from workflow.lib.model.trained_modules import ROWS, TrainedRows, train_rows_, unfreeze_
from workflow.lib.settings.config import LoraSettings
from workflow.lib.system.errors import setting_error
from workflow.lib.system.files import short_hash


def lora_config(settings: LoraSettings, *, linears: Iterable[str]) -> LoraConfig:
    """Return PEFT's config for a model with the quantized linears `linears` (paths). A regular
    expression becomes the paths that it matches: PEFT would try it on every module, and fail at an
    activation. Raises `UserError` if a name or pattern matches no linear layer."""
    targets = settings.target_modules
    paths = list(adapter_ranks(settings, linears=linears))
    if isinstance(targets, str) and targets != "all-linear":
        targets = tuple(paths)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.r,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT takes fractions too
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        rank_pattern=dict(settings.rank_pattern),
        alpha_pattern=dict(settings.alpha_pattern),
        bias="none",
    )


def inject_adapters(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """Wrap a meta-device model of frozen linears with LoRA. Only adapters, `lora.modules_to_save`
    and rows of added tokens require gradients, in fp32. Raises `UserError` if a name or pattern
    matches no linear layer, or no module that can be trained whole."""
    linears = dict(frozen_linears(model))
    stacks = [path for path, linear in linears.items() if isinstance(linear, FrozenStack)]
    ranks = adapter_ranks(settings, linears=linears, stacks=stacks)
    config = lora_config(settings, linears=linears)
    config.exclude_modules = excluded_pattern(model)
    peft_model = adapted(model, config)
    _check_ranks(model, ranks)
    unfreeze_(model, settings)
    # Set afterwards: PEFT itself would keep a frozen copy of each.
    config.modules_to_save = sorted({*settings.modules_to_save}) or None
    config.trainable_token_indices = train_rows_(model)
    for param in trainable_parameters(peft_model).values():
        assert param.dtype == torch.float32, (
            "PEFT gives adapters the fp32 type of the packed weights' view"
        )
    return peft_model


def adapter_config(peft_model: Any) -> dict[str, Any]:
    """Return the content of PEFT's `adapter_config.json`."""
    config = peft_model.peft_config[ADAPTER].to_dict()
    return {
        key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for key, value in config.items()
    } | {"inference_mode": True}


def adapted(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Wrap a meta model of frozen linears with the adapter of `config`, as `FusedLoraLinear`s."""
    # the first match is taken, and a stack is a linear
    config._register_custom_module({FrozenStack: FusedLoraStack, FrozenLinear: FusedLoraLinear})
    with torch.device("meta"), _without_family(model):
        peft_model: PeftModel = get_peft_model(model, config, adapter_name=ADAPTER)
    return peft_model


@contextmanager
def _without_family(model: PreTrainedModel) -> Iterator[None]:
    """Within the block a model has no `model_type`. For a mixture of experts PEFT (0.21) reads
    target names as those of Transformers 4: `down_proj` would mean the experts' parameter and no
    linear, `all-linear` the router too, and the rank of `gate_up_proj` would be doubled."""
    config: Any = model.config
    config.model_type = ""
    try:
        yield
    finally:
        del config.model_type  # the class's own is seen again


def _check_ranks(model: PreTrainedModel, expected: Mapping[str, int]) -> None:
    """Assert that PEFT has adapted exactly the linears of the settings."""
    layers: dict[str, Any] = {
        path: x for path, x in model.named_modules() if isinstance(x, BaseTunerLayer)
    }
    ranks = {path: layer.r[ADAPTER] for path, layer in layers.items()}
    wrong = [path for path in {**expected, **ranks} if ranks.get(path) != expected.get(path)]
    assert not wrong, (
        f"PEFT gives {wrong[0]} the rank {ranks.get(wrong[0])}, the settings "
        f"{expected.get(wrong[0])}"
    )


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return trained parameters by the name in PEFT's exported file, in the model's order. For a
    sharded model they are its shards: a gathered parameter is another object without a gradient,
    which no optimizer knows."""
    params = {
        peft_name(name): param for name, param in model.named_parameters() if param.requires_grad
    }
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        gathered = [name for name, param in params.items() if not isinstance(param, DTensor)]
        assert not gathered, f"{gathered[0]} is gathered: was a forward not in `forward_only`?"
    return params


def module_kind(name: str) -> str:
    """Return the kind of module of a trained tensor: `self_attn` for the adapter of
    `self_attn.q_proj`, `lm_head` for a head with an adapter or a trained head."""
    name = name.replace(f".{ROWS}.", ".")
    path, adapter, _ = name.partition(".lora_")
    *_, parent, own = path.split(".") if adapter else name.rpartition(".")[0].split(".")
    return own if not adapter or parent == "model" else parent


def peft_name(name: str) -> str:
    """Return the name in `adapter_model.safetensors` of a parameter of the training module."""
    start = name.index(PREFIX)
    short = without_cast(name[start:])
    short = short.replace(f".modules_to_save.{ADAPTER}.", ".").replace(f".{ADAPTER}.", ".")
    short = short.removesuffix(f".{ADAPTER}")  # trained rows are no module
    # PEFT keeps the name that DoRA's magnitudes had when they were no module of their own.
    return short.removesuffix(".weight") if ".lora_magnitude_vector." in short else short


@torch.no_grad()
def init_adapters_(model: nn.Module, *, seed: int, base: CheckpointReader) -> None:
    """Initialize as PEFT does (A uniform in +-1/sqrt(in_features), B zero), equal for any number of
    processes. Every A has its own generator, seeded by (seed, name); each process keeps its slice.
    DoRA's magnitudes are the row norms of the weights of `base`. Modules that are
    trained whole and trained rows begin with the base's values."""
    _init_from_base_(model, base)
    for name, param in trainable_parameters(model).items():
        if ".lora_" not in name or name.endswith(".lora_magnitude_vector"):
            continue
        if ".lora_B." in name:
            local(param).zero_()
            continue
        assert ".lora_A." in name, f"{name} is neither A nor B of an adapter"
        # kaiming_uniform_(a=sqrt(5)) over fan_in = in_features
        bound = 1.0 / math.sqrt(param.shape[1])
        draw = np.random.Generator(np.random.PCG64([seed, int(short_hash(name), 16)]))
        full = torch.from_numpy(
            draw.uniform(-bound, bound, size=tuple(param.shape)).astype(np.float32)
        )
        start, stop = local_range(param)
        local(param).copy_(full[start:stop])


def _init_from_base_(model: nn.Module, base: CheckpointReader) -> None:
    """Fill this process's slice of DoRA's magnitudes and of the trained rows of embedding and head,
    if there are any."""
    for path, layer in model.named_modules():
        name = path.partition(PREFIX)[2]
        if isinstance(layer, TrainedRows):
            layer.load_(base, f"{name.removesuffix(f'.{ROWS}')}.weight")
        if not isinstance(layer, FusedLoraLinear) or not layer.lora_variant:
            continue
        stored = checkpoint_name(name)
        magnitude, linear = layer.fused_magnitude(), layer.get_base_layer()
        assert isinstance(linear, FrozenLinear)
        start, stop = local_range(magnitude)
        norms = read_row_norms(linear, stored, base, start=start, stop=stop)
        _check_lengths(norms, stored, first_row=start)
        local(magnitude).copy_(norms)


def _check_lengths(norms: torch.Tensor, path: str, *, first_row: int) -> None:
    """Raise `UserError` for a row of zeros, whose length DoRA would divide by."""
    zeros = (norms == 0).nonzero()
    if len(zeros):
        raise setting_error(
            "lora.use_dora",
            True,
            f"row {first_row + int(zeros[0])} of {path} is zero in the base ({len(zeros)} such "
            "rows), and DoRA scales each row by its length",
            f"Set use_dora to false, or leave {path.rpartition('.')[2]} out of lora.target_modules",
        )
