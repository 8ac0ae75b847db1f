"""How much of a layer's experts is decoded at a time: for the engine and its predictions."""

from workflow.lib.system.units import MIB

# Of a stack, in the compute dtype, as long as a slice of it can be cut. The stacks of a layer are
# the largest weights of a model; but each slice reads all rows again: decoding and matmuls of an
# expert layer of gpt-oss-120b took 16.0 ms by slices of 256 MiB, 13.5 of 512, 12.3 of 1,024, and of
# GLM-4.5-Air's first stack 7.6, 6.9 and 6.3 (4,096 tokens, H100, November 2026).
DECODED_BYTES = 512 * MIB
