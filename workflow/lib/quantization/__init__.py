"""From the weights of a 16-bit checkpoint to an NF4 checkpoint that stock Transformers loads.

`nf4_checkpoint` reads the source and writes the result for both methods; alone it makes a base as
bitsandbytes does (absmax). A calibrated base is made by `calibrated_base`. `calibration_rows` picks
the tokens. `layer_stream` runs a model of any family one layer at a time, prepared as for training;
`beside` is what its layers hand on besides hidden states. `layer_inputs` looks at what goes into
its linears, `expert_tokens` at what goes into experts, `counted` at which tokens count.
`calibrated_rounding` rounds one weight, `calibrated_experts` a
stack of them, and `nf4_codes` stores it. `calibration` does this for a layer, and `resumable` for
all layers, with what is finished on disk. The stored format is the same, so no later stage knows
the method.

Entry points: `nf4_checkpoint.quantized_tensors`, `calibrated_base.write_calibrated`. It imports
`artifacts`, `data`, `model`, `settings` and `system`, and must not know training or evaluation."""
