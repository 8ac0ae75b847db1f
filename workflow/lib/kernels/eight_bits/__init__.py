"""Matmuls of frozen weights in float8 (`matmul`) and rounding to it (`rounding`). Each row of
either operand has a scale of its own."""
