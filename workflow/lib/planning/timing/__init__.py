"""Seconds of a training step, from rates that were fitted to measurements.

Begin with `step_time` and `machine_speed`. It imports `planning.memory`, and no torch."""
