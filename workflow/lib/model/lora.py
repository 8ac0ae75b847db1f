"""Adapters: injected by PEFT, so that names, configuration and files are PEFT's; computed by fused
nodes.

`lora_linear.FusedLoraLinear` is registered as PEFT's layer for `FrozenLinear` (PEFT's custom-module
dispatch).

Output head, input embedding and routers may be trained whole (PEFT's `modules_to_save`), and some
rows of head and embedding (PEFT's `trainable_token_indices`). Weights trained whole are fp32
masters under the family's names; they compute in the type of their input, with gradients in fp32.
Head and embedding are sliced by rows over processes (`vocabulary`), and `sum_copies_` adds the
gradients of copies; routers are sharded with their layers. Trained rows are a parameter beside the
frozen table, in FSDP's root; every forward first writes them to the table (`TrainedRows`)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import register_parametrization
from transformers import PreTrainedModel

from workflow.lib.checkpoints.files.stack_names import PREFIX
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.model.adaptable_linears import excluded_pattern
from workflow.lib.model.architecture.adapter_targets import (
    WholeModules,
    adapter_ranks,
    modules_to_save,
)
from workflow.lib.model.architecture.routers import CORRECTION, router_paths
from workflow.lib.model.experts.expert_matmul import FusedLoraStack
from workflow.lib.model.experts.fused_experts import FusedExperts
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
from workflow.lib.settings.config import LoraSettings
from workflow.lib.system.errors import setting_error
from workflow.lib.system.files import short_hash

TRAINED_ROWS = "trained_rows"  # key of a base's config.json: first and last + 1 of the rows
ROWS = "token_adapter"  # PEFT's names: of a module in the table's, and of its parameter
ROWS_TENSOR = f"{ROWS}.trainable_tokens_delta"


class MasterLinear(nn.Linear):
    """A linear that computes in the dtype of its input, with weights of any dtype."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b; input: (..., in_features)."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return nn.functional.linear(input, self.weight.to(input.dtype), bias)


class MasterRows:
    """Local rows of a trained embedding in `dtype`; padding gets no gradient, as in torch."""

    def __init__(self, embedding: nn.Module, dtype: torch.dtype) -> None:
        self._embedding, self._dtype = embedding, dtype
        self._padding = embedding.padding_idx

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, hidden) of ids (n,)."""
        table = self._embedding.weight
        assert isinstance(table, torch.Tensor)
        rows = nn.functional.embedding(ids, table, self._padding)  # type: ignore[arg-type]
        return rows.to(self._dtype)


class _Cast(nn.Module):
    """A parameter in the type that its module computes with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, master: torch.Tensor) -> torch.Tensor:
        """Return the master in that type."""
        return master.to(self._dtype)


class TrainedRows(nn.Module, BaseTunerLayer):
    """Rows of a frozen table as fp32 masters (n, hidden), by PEFT's names; PEFT turns them off."""

    adapter_layer_names = ("trainable_tokens_delta",)  # the rows themselves, not a difference

    def __init__(self, table: nn.Module, rows: range) -> None:
        super().__init__()
        weight = table.get_parameter("weight")
        assert len(weight) >= rows.stop, "the table has these rows"
        masters = _master(weight.new_empty(len(rows), weight.shape[1]))
        self.trainable_tokens_delta = nn.ParameterDict({"default": masters})
        self._rows = rows
        self._frozen: torch.Tensor | None = None  # rows of the base, of this process

    def values(self) -> torch.Tensor:
        """Return the whole masters. Collective where they are not gathered."""
        masters = self.trainable_tokens_delta["default"]
        return masters.full_tensor() if isinstance(masters, DTensor) else masters

    def within(self, weight: torch.Tensor) -> tuple[slice, slice]:
        """Return this process's trained rows of a sliced table, and their places in the masters."""
        start, stop = local_range(weight)
        first = max(start, self._rows.start)
        last = max(first, min(stop, self._rows.stop))
        return tuple(slice(first - n, last - n) for n in (start, self._rows.start))  # type: ignore

    def load_(self, base: CheckpointReader, name: str) -> None:
        """Take this process's slice of the masters from the table of the base."""
        masters = self.trainable_tokens_delta["default"]
        start, stop = (self._rows.start + row for row in local_range(masters))
        local(masters).copy_(base.rows(name, start, stop))

    @torch.no_grad()
    def write_(self, weight: torch.Tensor, *, base: bool = False) -> None:
        """Write its rows to a table: the masters, cast, or, turned off or for `base`, its own."""
        own, part = self.within(weight)
        rows = local(weight).data[own]  # .data, since no gradient needs the old values
        if self._frozen is None:
            self._frozen = rows.clone()
        rows.copy_(self._frozen if base or self.disable_adapters else self.values()[part])

    def over(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return embedding rows (n, hidden) of ids (n,), with masters for trained ids."""
        masters = self.values()
        indices = ids - self._rows.start
        inside = (indices >= 0) & (indices < len(masters))
        padded = torch.cat([masters, masters.new_zeros(1, masters.shape[1])])
        indices = indices.where(inside, len(masters))  # which gets no gradient
        looked_up = nn.functional.embedding(indices, padded, padding_idx=len(masters))
        return torch.where(inside[:, None], looked_up.to(rows.dtype), rows)


def write_rows_(model: PreTrainedModel, *, base: bool = False) -> None:
    """Write the trained rows to embedding and head; every forward begins with this."""
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        if hasattr(table, ROWS):
            getattr(table, ROWS).write_(table.weight, base=base)


def train_rows_(model: PreTrainedModel) -> dict[str, list[int]] | None:
    """Make the rows that a frozen meta model's config.json names trainable, in tables that are not
    trained whole; return PEFT's `trainable_token_indices`, None without any."""
    rows = range(*getattr(model.config, TRAINED_ROWS, (0,)))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    paths = {module: path for path, module in model.named_modules()}
    indices = {}
    for table in (embedding, head) if rows else ():
        if table is head and head.weight is embedding.weight:
            setattr(head, ROWS, getattr(embedding, ROWS))
        elif not table.weight.requires_grad:
            setattr(table, ROWS, TrainedRows(table, rows))
            indices[paths[table]] = [*rows]
    return indices or None


def unfreeze_(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Make the modules of `lora.modules_to_save` trainable in a frozen meta model. Raises
    `UserError` for other modules, a tied table, or a name that PEFT would misread."""
    if not settings.modules_to_save:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    paths = {id(module): path for path, module in model.named_modules()}
    routers = routers_of(model)
    offered = WholeModules(
        embedding=paths[id(embedding)],
        head=paths[id(head)],
        tied=embedding.weight is head.weight,
        routers=tuple(routers.values()),
    )
    chosen = modules_to_save(settings, offered, others=paths.values())
    if offered.embedding in chosen:
        embedding.weight = _master(embedding.weight)
    if offered.head in chosen:
        assert isinstance(head, nn.Linear)
        trained = MasterLinear(head.in_features, head.out_features, bias=False, device="meta")
        trained.weight = _master(head.weight)
        trained.bias = None if head.bias is None else _master(head.bias)
        model.set_output_embeddings(trained)
    for path in chosen.intersection(offered.routers):
        _unfreeze_router_(model.get_submodule(path))


def routers_of(model: PreTrainedModel) -> dict[str, str]:
    """Return the path of each router by the path of its experts, in a packed model."""
    experts = {
        path: module.num_experts
        for path, module in model.named_modules()
        if isinstance(module, FusedExperts)
    }
    shapes = {without_cast(name): tuple(x.shape) for name, x in model.named_parameters()}
    return router_paths(experts, shapes)


def _unfreeze_router_(router: nn.Module) -> None:
    """Train a family's router with its own forward, which sees the masters in the old type."""
    for module in [*router.modules()]:
        for name, param in [*module.named_parameters(recurse=False)]:
            if not name.endswith(CORRECTION):
                setattr(module, name, _master(param))
                register_parametrization(module, name, _Cast(param.dtype), unsafe=True)


def _master(tensor: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(tensor, dtype=torch.float32))


def trained_parts(module: nn.Module) -> list[torch.Tensor]:
    """Return the trained slices of a head's weight and bias, with gradients to the masters; with
    trained rows these alone, whole."""
    if hasattr(module, ROWS):
        return [getattr(module, ROWS).values()]
    params = dict(module.named_parameters(recurse=False))
    weights = [params[name] for name in ("weight", "bias") if name in params]
    return [p.to_local() if isinstance(p, DTensor) else p for p in weights if p.requires_grad]


@torch.no_grad()
def sum_copies_(training: Any) -> None:
    """Add up the fp32 gradients of trained slices that other processes hold too. Collective.
    training: `training_module.CausalLMForTraining`."""
    model: PreTrainedModel = training.peft_model.get_base_model()
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    for param in (p for x in tables for p in x.parameters(recurse=False) if p.requires_grad):
        grad = param.grad
        if isinstance(grad, DTensor) and grad.device_mesh.ndim > 1:
            dist.all_reduce(grad.to_local(), group=grad.device_mesh.get_group("replica"))


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
