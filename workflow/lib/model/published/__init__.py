"""Published checkpoints, read as the weights of a model's modules.

Transformers decides which files are read (`loaded_files`), and which tensors they become
(`loading`); this package reads the bytes. `decoded_reader` unpacks quantized formats;
`converted_reader`, on top of it, gives tensors the names and shapes of Transformers' modules.

It imports `architecture`, `decoder_layers`, `safetensors_reader` and `system`."""
