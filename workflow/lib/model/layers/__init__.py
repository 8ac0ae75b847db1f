"""Single layers: the NF4 linear, its products with adapters, norms, attention, GPU kernels.

Begin with `nf4_linear` and `nf4_lora_matmul`. Each has a test against a plain implementation.
It imports `architecture` and `system`, and knows neither a whole model nor processes.
"""
