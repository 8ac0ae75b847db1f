"""Products of frozen NF4 weights in 8 bits: formats, rounding, the product.

Begin with `products`, which says what is computed and computes it on a CPU. `gpu_kernels` starts
the kernels of `triton_code`. It imports `layers.kernels`, and knows no linear.
"""
