"""The loss of a micro-batch: the output head's matmul, cross-entropy in chunks, and the scale of
float16."""
