"""Checkpoints as they are published, read as the weights that a model's modules have.

`converted_reader` gives tensors the names and shapes of Transformers' modules.

It imports `model` and `system`.
"""
