"""Models and adapters on disk as objects: begin with `checkpoint.Checkpoint` and `adapter.Adapter`.

Transformers decides which files of a folder are read (`checkpoint.loaded_files`), and which tensors
they become (`check_loading`). `safetensors_reader` reads bytes; `decoded_reader` unpacks quantized
formats; `converted_reader` gives tensors the names and shapes of Transformers' modules. It imports
`kernels`, `settings` and `system`, and builds no model that computes."""
