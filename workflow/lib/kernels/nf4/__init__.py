"""NF4 weights as they are stored, and their decoding. `decode` reads bitsandbytes' codes, scales
and nested scales."""
