"""From the weights of a 16-bit checkpoint to an NF4 checkpoint that stock Transformers loads.

`nf4_checkpoint` reads the source and writes the result, for every method. `absmax` is what
bitsandbytes itself does, tensor by tensor. `calibrated` chooses codes and scales by what the
linears
really see: `calibration_rows` picks tokens, `layer_stream` runs a model of any family one layer at
a time, `layer_inputs` looks at what goes into its linears, `calibrated_rounding` rounds one weight,
`calibration` puts these together, and `resumable` keeps what is done on disk. The stored format is
the same, so nothing after this stage knows the method.

Entry points: `nf4_checkpoint.quantized_tensors`, `resumable.calibrated_layers`. Imports `model`,
`data`, `settings` and `system`, and no stage that comes later.
"""
