"""From the sharded adapter to files that stock Transformers and PEFT load, with proof.

Begin with `adapter_files` and `parity`; `stock_models` loads exported files. It imports
`distributed` and `model`, and nothing of `training`."""
