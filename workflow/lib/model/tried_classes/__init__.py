"""Classes of families, tried on small random values: `stand_ins` tries any, `feed_forward_forms`
finds by it which linears of a feed-forward do what, `rotary_functions` which function rotates
heads.
"""
