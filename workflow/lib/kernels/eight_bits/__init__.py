"""Matmuls of frozen weights in float8, and rounding to it (`matmul`). Each row of either operand
has a scale of its own."""
