"""Operations that have GPU kernels of ours, each with torch's operations for where there are none.

Begin with `op`, then the package of what you look for.
`triton_code` holds the kernels themselves, which `launch` starts; the op of a kernel says what it
computes. It imports `system`, and knows no model."""
