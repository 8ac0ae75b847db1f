"""Bytes of a training step on each GPU, counted in two ways.

`closed_form` adds up terms, for the search of plans. `trace_step` lists what the engine allocates
and frees, and `replay` runs that through `caching_allocator`, a model of PyTorch's allocator.
It imports `model.architecture`, and no torch.
"""
