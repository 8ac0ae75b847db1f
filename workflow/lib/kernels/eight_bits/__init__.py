"""Matmuls of frozen NF4 weights in 8 bits: formats, rounding, the matmul.

Begin with `matmul`, which says what is computed and computes it on a CPU. `gpu_kernels` starts
the kernels. It knows no linear.
"""
