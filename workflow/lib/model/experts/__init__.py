"""Mixtures of experts in training: the matmuls of tokens with the experts that they go to.

Begin with `fused_experts`, which takes the place of a family's module;
`expert_matmul` multiplies, and has PEFT's adapter layer, `layers.nf4_stack` holds weights.
"""
