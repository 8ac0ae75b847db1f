"""GPU kernels that do in one pass over memory what follows a product or comes before it: the
adapter's part that is added to it, the activation, the norm.

`low_rank` and `norm` start the kernels of `low_rank_code` and `norm_code`, and say what they
compute. They know no linear. `tried_kernels` holds kernels against torch before they are used.
"""
