"""What the files of a model or adapter say, read without torch.

Begin with `config_file` and `model_files`; `safetensors_headers` lists tensors, and
`adapter_config` reads PEFT's settings. It imports `settings` and `system` alone."""
