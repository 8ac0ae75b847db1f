"""From the weights of a 16-bit checkpoint to an NF4 checkpoint that stock Transformers loads.

`nf4_checkpoint` reads and writes for both methods, alone as bitsandbytes does (absmax);
`calibrated_base` makes a calibrated base of chosen tokens: `layer_stream` runs one layer at a time,
`layer_inputs` says what goes in and counts, `calibrated_rounding` and `calibrated_experts` round,
`nf4_codes` stores, `calibration` does a layer.
Later stages do not know the method.

It imports `artifacts`, `data`, `model`, `settings` and `system`."""
