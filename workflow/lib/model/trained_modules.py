"""Output head, input embedding and routers, trained whole (PEFT's `modules_to_save`), and some rows
of head and embedding (PEFT's `trainable_token_indices`).

Weights trained whole are fp32 masters under the family's names; they compute in the type of their
input, with gradients in fp32. Head and embedding are sliced by rows over processes (`vocabulary`),
and `sum_copies_` adds the gradients of copies; routers are sharded with their layers. Trained rows
are a parameter beside the frozen table, in FSDP's root; every forward first writes them to the
table (`TrainedRows`)."""

from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import register_parametrization
from transformers import PreTrainedModel

from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.model.architecture.adapter_targets import WholeModules, modules_to_save
from workflow.lib.model.architecture.routers import CORRECTION, router_paths
from workflow.lib.model.experts.fused_experts import FusedExperts
from workflow.lib.model.nf4_model import local, local_range, without_cast
from workflow.lib.settings.config import LoraSettings

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
