"""Recurrences of linear attention and state spaces, by matmuls of chunks of tokens.

Results equal the family's own torch code. There is no loop over tokens, and autograd keeps the
inputs alone."""
