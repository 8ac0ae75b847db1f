"""Operations that have GPU kernels of ours, each with torch's operations for where there are none.

Begin with `elementwise` (which also says where kernels run), then the package of what you look for.
`triton_code` holds the kernels themselves; what starts one says what it computes. `trials` compares
kernels with torch before they are used. It imports `system`, and knows no model.
"""
