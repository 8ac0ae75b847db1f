"""Checkpoints as they are published, read as the weights that a model's modules have.

`decoded_reader` unpacks FP8 and MXFP4 (`packed_formats`). On it stands `converted_reader`, which
gives tensors the names and shapes of Transformers' modules.

It imports `architecture`, `safetensors_reader` and `system`.
"""
