"""The model of a run: built on the meta device, its linears replaced by frozen ones, its weights
read slice by slice.

The order is fixed: `build_base_on_meta` -> adapters (`lora.inject_adapters`) -> sharding
(`fsdp.shard_`, or none) -> `materialize_` -> `load_weights_`. No process ever holds more than its
own slices and one tensor."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import drop_other_parts_
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.model.adaptable_linears import note_without_adapter_, weight_specs
from workflow.lib.model.experts.fused_experts import replace_experts_
from workflow.lib.model.layers.frozen_linear import FrozenLinear, frozen_linears
from workflow.lib.model.layers.weight_storage import WeightStorage, read_specs
from workflow.lib.system.errors import UserError
from workflow.lib.system.undocumented_interfaces import MODEL_PACKAGES, check_interfaces

# Transformers' mark of tensors that initialization skips. Checkpoints fill all parameters, and
# families cannot initialize a sharded one.
HAS_ITS_VALUE = "_is_hf_initialized"


def build_base_on_meta(
    base: Checkpoint, *, compute_dtype: torch.dtype, attention: str, attention_dropout: bool = True
) -> PreTrainedModel:
    """Build a base's model on meta (as `Checkpoint.build`): `FrozenLinear`s, in NF4 where the
    checkpoint is, everything frozen. Raises `UserError` if quantized tensors and linears do not
    correspond, or if an installed package lacks an interface."""
    check_interfaces(*MODEL_PACKAGES)
    model = base.build(compute_dtype, attention=attention, attention_dropout=attention_dropout)
    note_without_adapter_(model)
    drop_other_parts_(model)
    keep_in_float32_(model)
    with base.stored() as reader:
        specs = weight_specs(model, read_specs(reader), dtype=compute_dtype)
    return replace_linears_(model, specs, compute_dtype=compute_dtype)


def keep_in_float32_(model: PreTrainedModel) -> None:
    """Cast a meta-device model's tensors to float32 where its family always has them so: routers'
    corrections, say. Transformers does it when it loads weights."""
    names = [re.escape(name) for name in model._keep_in_fp32_modules_strict or ()]
    pattern = re.compile(rf"(.*\.)?({'|'.join(names)})(\..*)?")
    for path, module in model.named_modules() if names else ():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and pattern.fullmatch(f"{path}.{name}"):
                tensor.data = tensor.data.float()


def replace_linears_(
    model: PreTrainedModel, specs: Mapping[str, WeightStorage], *, compute_dtype: torch.dtype
) -> PreTrainedModel:
    """Replace every linear of a meta model with a spec, by path, by a `FrozenLinear`, and experts
    by `FusedExperts`; freeze all. Raises `UserError` for other shapes or unsupported experts."""
    experts: dict[str, dict[str, WeightStorage]] = {}
    for path, spec in specs.items():
        if spec.experts > 1:
            parent, _, name = path.rpartition(".")
            experts.setdefault(parent, {})[name] = spec
            continue
        linear = _linear_at(model, path, spec.shape)
        parent, _, name = path.rpartition(".")
        replacement = FrozenLinear(spec, bias=linear.bias is not None, compute_dtype=compute_dtype)
        setattr(model.get_submodule(parent), name, replacement)
    for path, stacks in experts.items():
        replace_experts_(model, path, stacks, compute_dtype=compute_dtype)
    model.requires_grad_(False)
    model.config.get_text_config().use_cache = model.config.use_cache = False
    say_quantized_(model)
    return model


def say_quantized_(model: PreTrainedModel) -> None:
    """Mark the model as quantized: then a family's code reads weights by modules alone (Jamba)."""
    for config in (model.config, model.config.get_text_config()):
        config._is_quantized = True


def _linear_at(model: nn.Module, path: str, shape: tuple[int, int]) -> nn.Linear:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear) or (module.out_features, module.in_features) != shape:
        raise UserError(
            f"the base has a quantized weight {path} of shape {shape} that the model has "
            "not: it belongs to another model. Delete its folder below results/base to have it "
            "made again."
        )
    return module


def materialize_(
    model: nn.Module, *, transformers_model: PreTrainedModel, device: torch.device
) -> None:
    """Allocate all parameters (local shards) and compute buffers that no checkpoint stores; raises
    `UserError` for one that `_init_weights` leaves out."""
    allocate_(model, device=device)
    compute_buffers_(transformers_model, transformers_model)


def allocate_(part: nn.Module, *, device: torch.device) -> None:
    """Allocate the parameters and buffers of a part of a model; tied ones stay tied."""
    shared = _shared_parameters(part)
    part.to_empty(device=device)  # allocates a tied parameter once per owner
    for owners in shared:
        (first, first_name), *others = owners
        for other, name in others:
            other.register_parameter(name, first.get_parameter(first_name))


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the owners (module, name) of every parameter that several modules share."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            owners.setdefault(id(param), []).append((module, name))
    return [group for group in owners.values() if len(group) > 1]


def compute_buffers_(transformers_model: PreTrainedModel, part: nn.Module) -> None:
    """Let the family compute non-persistent buffers, twice: a buffer that it leaves out keeps its
    old values. The module of the buffer initializes it, or one around it (Falcon-H1's decoder); the
    family is that of the innermost model (PaliGemma's text part)."""
    for module in part.modules():
        missing = {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set
        }
        around = _around(transformers_model, module)
        while missing and (owner := next(around, None)) is not None:
            missing = _not_computed(transformers_model, owner, missing)
        for name in missing:
            raise UserError(
                f"{type(transformers_model).__name__} is not supported: its buffer {name} of "
                f"{type(module).__name__} cannot be computed without a checkpoint. Choose "
                "another model.source."
            )


def _around(model: nn.Module, module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module of a model and all modules around it, the innermost first."""
    yield module
    for other in reversed([*model.modules()]):
        if other is not module and any(inner is module for inner in other.modules()):
            yield other


def _not_computed(
    transformers_model: PreTrainedModel, owner: nn.Module, buffers: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Let the family initialize `owner` twice; return the buffers that it does not change."""
    around = _around(transformers_model, owner)
    family: Any = next(module for module in around if isinstance(module, PreTrainedModel))
    for param in owner.parameters():
        setattr(param, HAS_ITS_VALUE, True)
    values = []
    for fill in (0, 1):
        for buffer in buffers.values():
            buffer.fill_(fill)
        family._init_weights(owner)
        values.append({name: buffer.clone() for name, buffer in buffers.items()})
    first, second = values
    return {n: buffer for n, buffer in buffers.items() if not torch.equal(first[n], second[n])}


def local(param: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a parameter (all of it if it is not sharded)."""
    return param.to_local() if isinstance(param, DTensor) else param


def cut_of(param: torch.Tensor) -> tuple[int, int]:
    """Return the number of a parameter's shards, and the index of this process's."""
    if not isinstance(param, DTensor):
        return 1, 0
    mesh = param.device_mesh
    axis = next(axis for axis, cut in enumerate(param.placements) if cut.is_shard())
    return mesh.size(axis), mesh.get_local_rank(axis)


def local_range(param: torch.Tensor) -> tuple[int, int]:
    """Return start and stop on dim 0 of this process's slice (cut as by `torch.chunk`)."""
    count, index = cut_of(param)
    size = -(-param.shape[0] // count)
    start = min(index * size, param.shape[0])
    return start, min(start + size, param.shape[0])


@torch.no_grad()
def load_weights_(
    model: nn.Module, reader: CheckpointReader, *, moved: Callable[[], None] = lambda: None
) -> int:
    """Fill every frozen parameter's slice and every stored buffer from an open checkpoint, and call
    `moved` after each. Return the bytes read. Raises `UserError` for a missing tensor. model:
    inside any PEFT wrapper."""
    read = 0
    for path, linear in frozen_linears(model):
        read += _load_frozen_(linear, checkpoint_name(path), reader)
        moved()
    for name, param in plain_parameters(model):
        start, stop = local_range(param)
        rows = reader.rows(checkpoint_name(name), start, stop)
        local(param).copy_(rows)
        read += rows.nbytes
        moved()
    for name, buffer in stored_buffers(model):
        buffer.copy_(reader.tensor(checkpoint_name(name)))
        read += buffer.nbytes
    return read


def plain_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return name and parameter of all but adapters and frozen weights, masters included."""
    frozen = {id(m.get_parameter(n)) for _, m in frozen_linears(model) for n in m.spec.sizes}
    return [
        (name, param)
        for name, param in model.named_parameters()
        if id(param) not in frozen and not is_adapter(name)
    ]


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to PEFT's adapter and not to the base."""
    return any(part in name for part in (".lora_", ".modules_to_save.", ".token_adapter."))


def stored_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return name and buffer of all stored buffers (`layer_scalar`), without tables of NF4."""
    return [
        (f"{path}.{name}" if path else name, buffer)
        for path, module in model.named_modules()
        if not isinstance(module, FrozenLinear)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def checkpoint_name(name: str) -> str:
    """Return a name in the model without the levels of PEFT's wrappers and of casts."""
    return without_cast(name.replace(".base_layer", "").replace(".original_module", ""))


def without_cast(name: str) -> str:
    """Return a parameter's own name, given that of its original (`torch.nn.utils.parametrize`)."""
    return re.sub(r"\.parametrizations\.(\w+)\.original$", r".\1", name)


def _load_frozen_(linear: FrozenLinear, path: str, reader: CheckpointReader) -> int:
    read = 0
    for name in linear.spec.sizes:
        target = local(getattr(linear, name)).view(torch.uint8)
        start, stop = (4 * element for element in local_range(getattr(linear, name)))
        data = linear.spec.read_bytes(name, path, reader, start=start, stop=stop)
        target.zero_()
        target[: data.numel()].copy_(data)
        read += data.numel()
    linear.spec.read_tables_(linear._buffers, path, reader)
    return read


def read_row_norms(
    linear: FrozenLinear, path: str, reader: CheckpointReader, *, start: int, stop: int
) -> torch.Tensor:
    """Return the L2 norms (stop - start,) fp32 of rows of a frozen weight, reading only these."""
    if start == stop:
        return torch.empty(0)
    rows = linear.spec.read_rows(linear._buffers, path, reader, start=start, stop=stop)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms
