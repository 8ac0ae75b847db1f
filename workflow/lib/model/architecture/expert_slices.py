"""How much of a layer's experts is decoded at a time: plain arithmetic, for the engine and for its
predictions.
"""

from workflow.lib.system.units import MIB

# Of a stack, in the compute type, as long as a slice of it can be cut. The stacks of a layer are
# the largest weights of a model.
DECODED_BYTES = 256 * MIB
