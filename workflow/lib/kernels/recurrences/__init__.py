"""Recurrences of linear attention and state spaces, by matmuls of chunks of tokens.

They compute what a family's own torch code does. Nothing goes token by token, and autograd keeps
the inputs alone."""
