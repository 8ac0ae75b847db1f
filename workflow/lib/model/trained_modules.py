"""Output head, input embedding and routers, trained whole (PEFT's `modules_to_save`).

Their weights are fp32 masters under the family's names; they compute in the type of their input,
with gradients in fp32. Head and embedding are sliced by rows over processes (`vocabulary`), and
`sum_copies_` adds up the gradients of copies; routers are sharded with their layers."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import register_parametrization
from transformers import PreTrainedModel

from workflow.lib.model.architecture.adapter_targets import WholeModules, modules_to_save
from workflow.lib.model.architecture.routers import CORRECTION, router_paths
from workflow.lib.model.experts.fused_experts import FusedExperts
from workflow.lib.model.nf4_model import without_cast
from workflow.lib.settings.config import LoraSettings


class MasterLinear(nn.Linear):
    """A linear that computes in the type of its input, whatever that of its weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b; input: (..., in_features)."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return nn.functional.linear(input, self.weight.to(input.dtype), bias)


class MasterRows:
    """Rows of a trained embedding here, in `dtype`; padding gets no gradient, as in torch."""

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
    """Return the trained slices of a head's weight and bias, with gradients to the masters."""
    params = dict(module.named_parameters(recurse=False))
    weights = [params[name] for name in ("weight", "bias") if name in params]
    return [p.to_local() if isinstance(p, DTensor) else p for p in weights if p.requires_grad]


@torch.no_grad()
def sum_copies_(training: Any) -> None:
    """Add up the gradients of trained slices of which other processes have copies, in fp32.
    Collective. training: the module that is trained (`training_module.CausalLMForTraining`)."""
    model: PreTrainedModel = training.peft_model.get_base_model()
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    for param in (p for table in tables for p in table.parameters() if p.requires_grad):
        grad = param.grad
        if isinstance(grad, DTensor) and grad.device_mesh.ndim > 1:
            dist.all_reduce(grad.to_local(), group=grad.device_mesh.get_group("replica"))
