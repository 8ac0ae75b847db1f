"""Mixtures of experts in training: the matmuls of tokens with the experts that they go to.

Begin with `fused_experts`, which takes the place of a family's module;
`lora_stack` is PEFT's adapter layer, `expert_matmul` multiplies, `layers.nf4_stack` holds weights.
"""
