"""Mixtures of experts in training: the matmuls of tokens with the experts that they go to.

Begin with `fused_experts`. `replace_experts` puts it in the place of a family's own module,
`lora_stack` is PEFT's adapter layer of it, `expert_matmul` computes frozen weights and adapters,
and `kernels.experts` multiplies tokens sorted by expert. How the weights lie in memory says
`layers.nf4_stack`."""
