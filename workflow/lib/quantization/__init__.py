"""From the weights of a 16-bit checkpoint to an NF4 checkpoint that stock Transformers loads.

`nf4_checkpoint` reads and writes for both methods, and alone does absmax as bitsandbytes does.
`calibrated_base` makes a calibrated base from chosen tokens: `layer_stream` runs one layer at a
time, `layer_inputs` collects the counted inputs, `calibrated_rounding` rounds, `nf4_codes` stores,
`calibration` handles a layer. Later stages do not know the method.

It imports `artifacts`, `data`, `model`, `settings` and `system`."""
