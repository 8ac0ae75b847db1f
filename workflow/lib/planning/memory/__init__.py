"""Bytes of a training step on each GPU, counted in two ways.

`closed_form` adds up terms, for the search of plans. `replay` runs what was recorded of the engine
(`lib/recording`, an `allocation_tape`) through `caching_allocator`, a model of PyTorch's allocator.
It imports `model.architecture`, and no torch.
"""
