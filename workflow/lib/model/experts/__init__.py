"""Mixtures of experts in training: the matmuls of tokens with their experts.

Begin with `fused_experts`, which replaces a family's module. `expert_matmul` has the matmuls and
PEFT's adapter layer, `layers.frozen_stack` the weights."""
