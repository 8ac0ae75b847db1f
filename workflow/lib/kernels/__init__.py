"""Operations that have GPU kernels of ours, each with torch's operations for where there are none.

Begin with `op`: an `Op` joins kernel, reference and a small case, and all ops are one table. A new
kernel is a module with its op, and its Triton code in `triton_code`, which `launch` starts; trial,
recordings, CPUs and tests know it from the table. It imports `system`, and knows no model."""
