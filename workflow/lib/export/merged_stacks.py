"""The stacks of experts of a merged model, made expert by expert and written as the family
publishes them: a tensor for each projection of each expert, or a tensor for the stack.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from workflow.lib.export.packed_stacks import stored_stack
from workflow.lib.export.stack_names import PREFIX
from workflow.lib.model.architecture.adapter_targets import adapter_scale
from workflow.lib.model.layers.expert_stacks import ExpertStack
from workflow.lib.model.published.converted_reader import ConvertedReader
from workflow.lib.model.safetensors_reader import CheckpointReader


def merged_stacks(
    adapter: Mapping[str, torch.Tensor],
    adapter_config: Mapping[str, Any],
    *,
    original: ConvertedReader,
    nf4: CheckpointReader,
    onto: str,
    stacks: Mapping[str, ExpertStack],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name in the original's files and bf16 tensor of all that the stacks are published as.
    adapter: by names in training; onto: `dequantized` (the weights that were trained on) or
    `original`; stacks: of `expert_stacks`. The sum is in fp32, rounded once."""
    for path, stack in stacks.items():
        if onto == "dequantized":
            weights = iter(stored_stack(nf4, path, stack))
        else:
            weights = original.experts(path)
        changes = _changes(adapter, path, scale=adapter_scale(adapter_config, path), stack=stack)
        experts = (
            (weight.float() + change).to(torch.bfloat16)
            for weight, change in zip(weights, changes, strict=True)
        )
        yield from original.published(path, experts)


def _changes(
    adapter: Mapping[str, torch.Tensor], path: str, *, scale: float, stack: ExpertStack
) -> Iterator[torch.Tensor]:
    """Yield s B A of each expert in the family's own orientation, fp32; zero without an adapter.
    PEFT keeps A as (experts, rank, in) by rows, and B as (out, rank, experts) by columns."""
    num_experts, out_features, in_features = stack.shape
    key = f"{PREFIX}{path}.lora_"
    if f"{key}A.weight" not in adapter:
        yield from torch.zeros(()).expand(num_experts)
        return
    a_weights = adapter[f"{key}A.weight"].float().view(num_experts, -1, in_features)
    b_weights = adapter[f"{key}B.weight"].float().view(out_features, -1, num_experts)
    for expert in range(num_experts):
        change = scale * (b_weights[..., expert] @ a_weights[expert])
        yield change.T if stack.transposed else change
