"""PEFT's LoRA layer on an `NF4Stack`: an adapter for each expert, in the layout that PEFT gives the
adapter of a 3-D parameter.

PEFT's `ParamWrapper` (0.21) keeps the A of all experts one below the other, (experts * r, in). In
their B (out, r * experts) the experts alternate: column i is column i // experts of expert
i % experts."""

from typing import Any

import torch
from torch import nn

from workflow.lib.model.layers.lora_linear import FusedLoraLinear
from workflow.lib.model.layers.nf4_stack import NF4Stack


class FusedLoraStack(FusedLoraLinear):
    """Adapters of all experts of a stack; `expert_matmul` computes them."""

    def update_layer(self, adapter_name: str, r: int, *args: Any, **kwargs: Any) -> None:
        """Give the layer the adapter `adapter_name` of rank `r` for each expert."""
        super().update_layer(adapter_name, r, *args, **kwargs)
        stack = self.stack()
        rank = stack.num_experts * r
        sizes = {"lora_A": (stack.in_features, rank), "lora_B": (rank, stack.expert_rows)}
        for name, (in_features, out_features) in sizes.items():
            weight = getattr(self, name)[adapter_name].weight
            linear = nn.Linear(in_features, out_features, bias=False, device=weight.device)
            linear.requires_grad_(weight.requires_grad)
            getattr(self, name)[adapter_name] = linear

    def stack(self) -> NF4Stack:
        base = self.get_base_layer()
        assert isinstance(base, NF4Stack)
        return base

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Never called: a token goes to some of the experts (`fused_experts`)."""
        raise NotImplementedError("which experts x goes to is not known here")
