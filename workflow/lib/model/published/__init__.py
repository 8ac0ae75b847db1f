"""Checkpoints as they are published, read as the weights that a model's modules have.

Transformers decides which files are read (`loaded_files`), and what of them becomes which tensor
(`loading`); the bytes are read here. `decoded_reader` unpacks FP8 and MXFP4. On
it stands `converted_reader`, which gives tensors the names and shapes of Transformers' modules.

It imports `architecture`, `decoder_layers`, `safetensors_reader` and `system`."""
