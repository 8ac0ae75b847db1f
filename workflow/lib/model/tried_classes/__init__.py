"""Classes of families, tried on random values: `magnitudes` says how large the values are and when
two results are alike, `rotary_functions` which function rotates heads."""
