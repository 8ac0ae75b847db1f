"""What a model is, read from its `config.json` and tensor headers, without torch.

Begin with `model_shape` (`ModelShape`, `shape_of_config`) and `families` (which classes are
supported). `adapter_targets` says which linears get an adapter.
It imports `system` and `settings` alone.
"""
