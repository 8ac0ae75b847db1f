"""Classes of families, tried on random values: `stand_ins` tries any, `magnitudes` says how large
the values are and when two results are alike, `feed_forward_forms` finds by it which linears of a
feed-forward do what, `rotary_functions` which function rotates heads."""
