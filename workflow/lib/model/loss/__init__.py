"""The loss of a micro-batch: the head's matmul, cross-entropy in chunks, float16's scale."""
