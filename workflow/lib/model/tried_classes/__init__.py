"""Comparison of families' classes on random values: `magnitudes` has the values and when results
are alike, `rotary_functions` finds the function that rotates heads. A fused layer replaces a
family's own only where this shows that both compute the same."""
