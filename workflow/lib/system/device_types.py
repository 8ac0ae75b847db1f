"""Kinds of devices that the engine computes on, by torch's names."""

RECORDED = "recorded"
"""A GPU that is not there: its tensors have a shape and no values, and what the engine asks of its
memory is recorded (`workflow.lib.recording`)."""
GPUS = frozenset({"cuda", RECORDED})
"""Devices with memory and streams of their own, beside the host's."""
