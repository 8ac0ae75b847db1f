"""From the sharded adapter to files that stock Transformers and PEFT load, with proof.

Begin with `adapter_files` and `parity`; `stock_models` loads what was exported.
It imports `distributed` and `model`, and nothing of `training`."""
