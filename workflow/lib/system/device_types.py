"""Kinds of devices that the engine computes on, by torch's names."""

RECORDED = "recorded"
"""A simulated GPU: tensors without values, whose memory is recorded (`recording`)."""
GPUS = frozenset({"cuda", RECORDED})
"""Devices with memory and streams of their own, beside the host's."""
