"""Operations with the project's GPU kernels, and torch's operations for devices without them.

Begin with `op`: an `Op` joins kernel, reference and a small case, and all ops are one table. A new
kernel is a module with its op, and its Triton code in `triton_code`, which `kernel_launch` starts;
checks, recordings, CPUs and tests read the table. It imports `system`, and knows no model."""
