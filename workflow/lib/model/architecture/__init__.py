"""What a model is, read from its `config.json` and tensor headers, without torch.

Begin with `model_shape` (`ModelShape`, which `model.describe_model` makes by building the model's
class) and `checkpoint_headers`. `adapter_targets` says which linears get an adapter.
It imports `system` and `settings` alone."""
