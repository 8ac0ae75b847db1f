"""Single layers: the frozen linear, its matmuls with adapters, norms, rotary positions.

Begin with `frozen_linear` and `lora_matmul`. Each has a test against a plain implementation.
It imports `architecture`, `kernels` and `system`, and knows neither a whole model nor processes."""
