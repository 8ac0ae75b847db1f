"""What a model is, without torch.

Begin with `model_shape` (`ModelShape`, which `model.describe_model` makes by building the model's
class). `adapter_targets` says which linears get an adapter.
It imports `checkpoints.files`, `settings` and `system` alone."""
