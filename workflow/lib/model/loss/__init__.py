"""The loss of a micro-batch: the output head's product, cross-entropy in chunks, and the scale of
float16.
"""
