"""NF4 weights as they are stored, and their decoding."""
